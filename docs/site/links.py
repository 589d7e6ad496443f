"""What is checked of the built site: every link leads somewhere, and no page asks another machine for anything.

Pages are read with the standard library's HTML parser, scripts and style sheets as text. A link to another site is text
until somebody follows it: its form is checked, and nothing is asked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that a browser follows by itself, on these elements.
LOADED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "track": "src", "input": "src", "object": "data", "image": "href", "use": "href",
}  # fmt: skip
_REMOTE = re.compile(r"\s*(?:[a-z][a-z+.-]*:)?//", re.I)
# What a style sheet or a script fetches.
_CSS = re.compile(r"@import\s+(?:url\()?[\"']?([^\"');]+)|url\(\s*[\"']?([^\"')]+)")
_SCRIPT = re.compile(
    r"(?:\bfetch|\bimport|\bimportScripts|\bnew (?:WebSocket|EventSource|Worker|URL)|\.open)\(\s*(?:\"GET\",\s*)?"
    r"[\"'`]((?:https?:|wss?:)?//[^\"'`]+)|\bfrom\s*[\"']((?:https?:)?//[^\"']+)|\.(?:src|href)\s*=\s*[\"'`]((?:https?:)?//[^\"'`]+)"
)


class Page(HTMLParser):
    """What a page has: anchors, links, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.loads: list[str] = []
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.anchors |= {said[name] for name in ("id", "name") if name in said}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        if tag in LOADED and LOADED[tag] in said:
            self.loads.append(said[LOADED[tag]])
        if tag == "link" and set(said.get("rel", "").split()) & {
            "stylesheet",
            "icon",
            "preload",
            "modulepreload",
            "prefetch",
            "preconnect",
            "dns-prefetch",
            "manifest",
        }:
            self.loads.append(said.get("href", ""))
        self.loads += [part.split()[0] for part in said.get("srcset", "").split(",") if part.strip()]
        self.loads += _in_style(said.get("style", ""))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += _in_style(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def _in_style(text: str) -> list[str]:
    return [a or b for a, b in _CSS.findall(text)]


def problems(html: Path) -> list[str]:
    """What is wrong with a built site, a line each, with the page."""
    paths = [
        path for path in sorted(html.rglob("*.html")) if html / "_static" not in path.parents
    ]  # a theme's templates
    pages = {path: Page(path.read_text()) for path in paths}
    found = defaultdict[str, list[str]](list)  # the same on many pages is one line
    for path, page in pages.items():
        name = str(path.relative_to(html))
        for target in page.loads:
            if _REMOTE.match(target):
                found[f"asks another machine: {target}"].append(name)
            elif not target.startswith("data:") and not _exists(path, target, html):
                found[f"loads what is not there: {target}"].append(name)
        for wrong in _broken(path, page, pages, html):
            found[wrong].append(name)
    for path in sorted(html.rglob("*.css")) + sorted(html.rglob("*.js")):
        for target in remote(path.read_text(errors="replace"), path.suffix):
            found[f"asks another machine: {target}"].append(str(path.relative_to(html)))
    return [f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {what}" for what, names in found.items()]


def remote(text: str, suffix: str) -> Iterator[str]:
    """What a style sheet (.css) or a script (.js) fetches from elsewhere."""
    pattern = _CSS if suffix == ".css" else _SCRIPT
    for groups in pattern.findall(text):
        target = next(filter(None, groups if isinstance(groups, tuple) else (groups,)), "")
        if _REMOTE.match(target):
            yield target


def _exists(page: Path, target: str, html: Path) -> bool:
    path = unquote(urlsplit(target).path)
    return (html / path.lstrip("/") if path.startswith("/") else page.parent / path).exists()


def _broken(path: Path, page: Page, pages: dict[Path, Page], html: Path) -> Iterator[str]:
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if not well_formed(link):
                yield f"no address: {link}"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.exists():
            yield f"leads nowhere: {link}"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"no such place: {link}"


def well_formed(link: str) -> bool:
    """Whether an external link has the form of one: https, a host with a dot or this machine, no blanks."""
    parts = urlsplit(link)
    if parts.scheme == "mailto":
        return "@" in parts.path
    host = parts.hostname or ""
    here = host in ("127.0.0.1", "localhost")
    return parts.scheme in ("http", "https") and ("." in host or here) and not re.search(r"\s", link)
