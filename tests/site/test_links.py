"""What is checked of the built site finds each kind of fault in a site of two pages, and none in a right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.site import links

RIGHT = """<!doctype html><html><head><link rel="stylesheet" href="_static/s.css"><link rel="canonical" href="https://a.b/">
<script src="_static/s.js"></script><style>p { background: url(data:image/png;base64,AA) }</style></head><body id="top">
<h1 id="one">x</h1><a href="#one">x</a><a href="sub/other.html#two">x</a><a href="https://arxiv.org/abs/1909.08053">x</a>
<a href="http://127.0.0.1:8000">x</a><a href="mailto:a@b.c">x</a><img src="_static/p.png" srcset="_static/p.png 2x">
</body></html>"""


def site(folder: Path, page: str = RIGHT, css: str = "", js: str = "") -> list[str]:
    (folder / "_static").mkdir()
    (folder / "sub").mkdir()
    (folder / "index.html").write_text(page)
    (folder / "sub" / "other.html").write_text('<p id="two"><a href="../index.html">x</a></p>')
    (folder / "_static" / "p.png").write_bytes(b"")
    (folder / "_static" / "s.css").write_text(css)
    (folder / "_static" / "s.js").write_text(js)
    return links.problems(folder)


def test_a_right_site_has_no_problem(tmp_path: Path) -> None:
    css = '@import "t.css"; a { background: url(p.png) } b { background: url("data:,x") }'
    js = 'const home = "https://pydata.org"; fetch("searchindex.js"); // see https://a.b/c'
    assert site(tmp_path, css=css, js=js) == []


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('href="_static/s.css"', 'href="https://cdn.example.org/s.css"', "asks another machine"),
        ('href="_static/s.css"', 'href="_static/none.css"', "loads what is not there"),
        ('src="_static/s.js"', 'src="//cdn.example.org/s.js"', "asks another machine"),
        ('img src="_static/p.png"', 'img src="HTTPS://example.org/p.png"', "asks another machine"),
        ('srcset="_static/p.png 2x"', 'srcset="//example.org/p.png 2x"', "asks another machine"),
        ("url(data:image/png;base64,AA)", "url(https://example.org/font.woff2)", "asks another machine"),
        ('<h1 id="one">', '<h1 id="one" style="background: url(//e.org/x)">', "asks another machine"),
        ('rel="canonical" href="https://a.b/"', 'rel="preconnect" href="https://a.b/"', "asks another machine"),
        ('href="sub/other.html#two"', 'href="sub/none.html"', "leads nowhere"),
        ('href="sub/other.html#two"', 'href="sub/other.html#three"', "no such place"),
        ('href="#one"', 'href="#none"', "no such place"),
        ('href="https://arxiv.org/abs/1909.08053"', 'href="https://arxiv/abs 19"', "no address"),
        ('href="https://arxiv.org/abs/1909.08053"', 'href="javascript:alert(1)"', "no address"),
    ],
)
def test_a_fault_of_a_page_is_found(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in RIGHT
    (problem,) = site(tmp_path, RIGHT.replace(old, new))
    assert problem.startswith(f"index.html: {said}: ")


@pytest.mark.parametrize(
    "suffix, text",
    [
        (".css", "@import url('https://fonts.example.org/css');"),
        (".css", '@import "//fonts.example.org/css";'),
        (".css", "@font-face { src: url(https://example.org/f.woff2) }"),
        (".js", 'fetch("https://example.org/x")'),
        (".js", "new WebSocket('wss://example.org')"),
        (".js", 'import("https://cdn.example.org/m.js")'),
        (".js", 'import x from "https://cdn.example.org/m.js"'),
        (".js", 'script.src = "https://cdn.example.org/m.js"'),
        (".js", 'request.open("GET", "https://example.org/x")'),
    ],
)
def test_a_fault_of_a_style_sheet_or_a_script_is_found(suffix: str, text: str, tmp_path: Path) -> None:
    (problem,) = site(tmp_path, **{suffix[1:]: text})
    assert problem.startswith(f"_static/s{suffix}: asks another machine: ")


def test_the_same_fault_of_many_pages_is_one_line(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.html").write_text('<a href="gone.html">x</a>')
    assert links.problems(tmp_path) == ["a.html and 2 more: leads nowhere: gone.html"]
