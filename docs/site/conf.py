"""Sphinx's configuration; below it what Sphinx has not, in the order of `setup`."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexer import bygroups
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

from docs.site import reference

ROOT = Path(__file__).resolve().parents[2]
MODULES = {module.name: ROOT / module.path for module in reference.modules(ROOT)}

project = "minimegatron"
author = "the authors of minimegatron"
copyright = "the authors of minimegatron; Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.viewcode"]

nb_execution_mode = "off"  # outputs are those that the repository stores
nb_output_stderr = "show"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
viewcode_follow_imported_members = False  # it would import
highlight_language = "text"
python_maximum_signature_line_length = 100
suppress_warnings = ["myst.header"]  # a lab may go from its title to a small heading
add_module_names = False
toc_object_entries_show_parents = "hide"

# MathJax, as a package brings it; SVG needs no fonts. The menu would load further files.
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "pydata_sphinx_theme"
html_title = "minimegatron"
html_favicon = "static/mark.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {
    pattern: list[str]()
    for pattern in ("index", "README", "questions", "map", "docs/reading_plan", "docs/glossary", "docs/architecture",
                    "files/**", "_modules/**", "genindex", "search")
}  # fmt: skip
html_theme_options: dict[str, Any] = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,  # arrow keys scroll
    "collapse_navigation": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


class LabLexer(PythonLexer):
    """Python in which a line may be a magic: `%%torchrun -n 4`, `%load_ext course`, `!ls`."""

    name, aliases = "lab", ["lab"]
    tokens = {
        **PythonLexer.tokens,
        "root": [(r"^(%%?\w+|!)(.*)$", bygroups(Keyword, Comment)), *PythonLexer.tokens["root"]],
    }


class Search(SearchEnglish):
    """English words, and of Chinese, which has no blanks between words, each two characters that are neighbours."""

    js_splitter_code = r"""
function splitQuery(query) {
  return query.split(/([\u4e00-\u9fff]+)|[^\p{L}\p{N}_]+/u).filter((piece) => piece).flatMap((piece) =>
    /^[\u4e00-\u9fff]{3,}$/.test(piece) ? [...piece].slice(1).map((char, i) => piece[i] + char) : [piece]);
}
"""

    def split(self, input: str) -> list[str]:
        """The words of a text: what is Chinese of a word in pairs."""
        pieces = re.findall(r"[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])\w)+", input)
        chinese = [re.match(r"[\u4e00-\u9fff]{3}", piece) for piece in pieces]
        pairs = ([p[i : i + 2] for i in range(len(p) - 1)] if c else [p] for p, c in zip(pieces, chinese, strict=True))
        return [word for words in pairs for word in words]


class LinkModules(SphinxTransform):
    """A name of a module between backticks, `comm/mesh` or `layers/linear.py`, is a link to its page."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        page = self.env.current_document.docname
        own = page.removeprefix("api/").removesuffix("/index").replace("/", ".") if page.startswith("api/") else ""
        if own in MODULES:
            self.env.note_dependency(str(MODULES[own]))  # whose text `viewcode` shows
        for literal in list(self.document.findall(nodes.literal)):
            name = _module(literal.astext())
            if name in (None, own) or isinstance(literal.parent, nodes.reference | addnodes.pending_xref | nodes.title):
                continue
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="mod", reftarget=name, refexplicit=True, refwarn=True, refdoc=page
            )
            literal.replace_self(link)
            link += literal


@functools.cache
def _module(text: str) -> str | None:
    """The module that a path names, from the package or from the repository's root; None if it names none."""
    match = re.fullmatch(r"(?:minimegatron/)?([a-z]\w*(?:/[a-z]\w*)*)(?:/|/__init__\.py|\.py)?", text)
    inside = match[1].replace("/", ".") if match and "/" in text else ""
    return next((name for name in (inside, f"minimegatron.{inside}") if name in MODULES), None)


@functools.cache
def _source(module: str) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """The source of a module, and where its names stand in it."""
    text = MODULES[module].read_text()
    return text, ModuleAnalyzer.for_string(text, module).find_tags()


@functools.cache
def _scope(module: str) -> dict[str, str]:
    """The names of classes and modules in a module: its own and those that it imports, as absolute ones."""
    names = dict[str, str]()
    for node in ast.walk(ast.parse(_source(module)[0])):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            firsts = [alias.name.partition(".")[0] for alias in node.names]
            names |= {
                a.asname or first: a.name if a.asname else first for a, first in zip(node.names, firsts, strict=True)
            }
        elif isinstance(node, ast.ClassDef):
            names[node.name] = f"{module}.{node.name}"
    return names


def _types(app: Sphinx, document: nodes.document) -> None:
    """A type in a signature is the class that this name has in that module; Sphinx would look for any of that name."""
    for link in document.findall(addnodes.pending_xref):
        if (module := link.get("py:module")) and link.get("refdomain") == "py" and link["reftype"] != "mod":
            first, dot, rest = link["reftarget"].partition(".")
            link["reftarget"] = _scope(module).get(first, first) + dot + rest
            link.attributes.pop("refspecific", None)  # its presence asks for a search of any class of this name


def _language(app: Sphinx, page: str, template: str, context: dict[str, Any], document: object) -> None:
    """Say of a Chinese page that it is one, for hyphens, fonts and screen readers."""
    if page.startswith("zh/") or page.endswith(".zh"):
        context["language"] = "zh-CN"


def _mathjax(app: Sphinx, error: Exception | None) -> None:
    """Copy MathJax into the site."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    assert spec and spec.submodule_search_locations, "the package sphinx-mathjax-offline, of the extra `site`"
    source = Path(next(iter(spec.submodule_search_locations)), "static", mathjax_path)
    if error is None and app.builder.format == "html":
        target = Path(app.outdir, "_static", mathjax_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def setup(app: Sphinx) -> dict[str, Any]:
    """What `conf.py` adds to Sphinx."""
    app.add_lexer("lab", LabLexer)
    app.add_transform(LinkModules)
    app.add_search_language(Search)
    app.connect("viewcode-find-source", lambda app, module: _source(module))
    app.connect("doctree-read", _types)
    app.connect("html-page-context", _language)
    app.connect("build-finished", _mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
