"""The website in a real browser: phone and desktop, light and dark, by keyboard, and no request leaves it.

It is built first, where it is not (`make site`). Pictures stay in `build/browser/site/`, for whoever wants to look.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import browser

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "build" / "site" / "html"
PICTURES = ROOT / "build" / "browser" / "site"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "not skipped"),
]
PAGES = [
    "index.html", "README.html", "labs/01_process_groups.html", "solutions/03_pipeline_1f1b.html", "questions.html",
    "map.html", "docs/reading_plan.html", "docs/architecture.html", "docs/glossary.html", "api/index.html",
    "api/minimegatron/comm/mesh.html", "api/minimegatron/config/model.html", "_modules/minimegatron/comm/mesh.html",
    "files/examples/simple_loop.py.html", "search.html?q=zigzag", "genindex.html", "README.zh.html",
    "zh/questions.html", "zh/labs/05_moe_ep.html",
]  # fmt: skip
# By how many pixels a page would have to be pushed sideways.
WIDER = "() => document.documentElement.scrollWidth - window.innerWidth"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site, served on this machine."""
    if not (HTML / "index.html").exists():
        pytest.importorskip("sphinx")
        subprocess.run([sys.executable, "-m", "docs.site"], cwd=ROOT, check=True, timeout=1400)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser.chromium(), args=browser.FLAGS)
        yield launched
        launched.close()


def opened(chromium: Any, address: str, name: str, complaints: list[str], **options: Any) -> Any:
    page = chromium.new_context(**options).new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: complaints.append(f"{name}: {error}"))
    page.on("console", lambda m: complaints.append(f"{name}: {m.text}") if m.type in ("error", "warning") else None)
    page.on(
        "request", lambda r: None if r.url.startswith((address, "data:")) else complaints.append(f"{name}: {r.url}")
    )
    page.on("response", lambda r: complaints.append(f"{name}: {r.status} {r.url}") if r.status >= 400 else None)
    page.goto(address + name, wait_until="networkidle")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_and_ask_nobody_else(width: int, scheme: str, address: str, chromium: Any) -> None:
    complaints: list[str] = []
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        size = {"width": width, "height": 900}
        page = opened(chromium, address, name, complaints, viewport=size, color_scheme=scheme)
        assert page.evaluate(WIDER) <= 0, f"{name} is wider than {width}"
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.screenshot(path=PICTURES / f"{name.split('?')[0].replace('/', '-')}-{width}-{scheme}.png")
        page.context.close()
    assert not complaints


def test_a_chinese_table_has_no_column_of_single_characters(address: str, chromium: Any) -> None:
    complaints: list[str] = []
    size = {"width": 390, "height": 900}
    page = opened(chromium, address, "zh/labs/02_tensor_parallel.html", complaints, viewport=size)
    assert page.locator("article td").first.bounding_box()["width"] > 80
    assert page.evaluate(WIDER) <= 0 and not complaints


def test_formulas_are_set(address: str, chromium: Any) -> None:
    complaints: list[str] = []
    page = opened(chromium, address, "labs/02_tensor_parallel.html", complaints)
    page.wait_for_selector("mjx-container svg")
    assert (
        page.locator("mjx-container").count() >= 5 and page.locator("mjx-container [data-mml-node=merror]").count() == 0
    )
    assert not complaints


def test_by_keyboard_alone(address: str, chromium: Any) -> None:
    complaints: list[str] = []
    page = opened(chromium, address, "index.html", complaints, viewport={"width": 1280, "height": 900})
    focused = "document.activeElement.textContent.trim()"
    page.keyboard.press("Tab")
    assert "Skip to main content" in page.evaluate(focused)
    reached = list[str]()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    assert {"Start", "Labs", "Questions", "Reference"} <= set(reached)

    page.keyboard.press("Control+k")
    page.keyboard.type("zigzag")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=zigzag*")
    page.wait_for_selector("#search-results a")
    found = page.locator("#search-results a").all_text_contents()
    assert any("Lab 04" in text for text in found) and any("comm/sequence" in text for text in found)

    page.goto(address + "search.html?q=FP8")  # labs and guides before names of which the word is a part
    page.wait_for_function("document.querySelectorAll('#search-results li > a').length > 100")
    found = page.locator("#search-results li > a").all_text_contents()
    assert "Lab 07" in found[0], found[:5]

    page.goto(address + "search.html?q=梯度")  # two characters inside of longer runs
    page.wait_for_selector("#search-results a")
    assert any("实验" in text for text in page.locator("#search-results a").all_text_contents())

    page.goto(address + "questions.html")
    summary = page.locator("details > summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.evaluate("d => d.open")
    assert not complaints
