"""The page in a real browser: curves are drawn, keys and mouse work, nothing is asked from elsewhere.

Pictures stay in `build/watch/`, for whoever wants to look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import browser
from tests.watch.generated import records, write
from tests.watch.test_log import add, simple
from tests.watch.test_server import serving

PICTURES = Path(__file__).resolve().parents[2] / "build" / "watch"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "not skipped"),
]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
INK = """canvas => {
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
    for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data.slice(i, i + 3).join());
    return seen.size }"""


@contextlib.contextmanager
def opened(port: int, size: str = "desktop", scheme: str = "light") -> Iterator[tuple[Any, list[str]]]:
    """(Page, what is wrong with it): errors, and requests to anywhere else."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    home = f"http://127.0.0.1:{port}/"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser.chromium(), headless=True, args=browser.FLAGS)
        width, height = SIZES[size]
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith((home, "data:")) else wrong.append(r.url))
        page.goto(home)
        page.wait_for_selector("#log li")
        try:
            yield page, wrong
        finally:
            chromium.close()


@pytest.mark.parametrize(
    "size, scheme, number", [("desktop", "light", 1), ("phone", "dark", 2), ("desktop", "dark", 2)]
)
def test_the_whole_page(tmp_path: Path, size: str, scheme: str, number: int) -> None:
    paths = [
        write(tmp_path / f"{name}/run.jsonl", records(600, world=world, layers=4, seed=world, lr=lr))
        for name, world, lr in [("a", 8, 1e-3), ("b", 2, 2e-3)][:number]
    ]
    with serving(*paths) as client, opened(client.to.port, size, scheme) as (page, wrong):
        page.wait_for_function("() => document.querySelectorAll('#charts .card').length >= 8")
        page.wait_for_selector("#timeline canvas")
        page.wait_for_selector("#layers canvas")
        page.wait_for_timeout(500)
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(PICTURES / f"{size}-{scheme}-{number}.png"), full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
        assert page.evaluate("document.documentElement.classList.contains('dark')") == (scheme == "dark")
        assert all(page.locator(f"{at} canvas").first.evaluate(INK) > 5 for at in ("#charts", "#timeline", "#layers"))
        assert page.locator("#charts canvas").first.get_attribute("aria-label").startswith("lm loss: ")
        slow = page.locator("#ranks .slow").all_inner_texts()
        assert slow == ["rank 4 on node3 is slow in forward: 35.0 ms a step more than its peers, always"]
        assert ("training.global_batch_size" in page.inner_text("#config")) is False
        assert ("what differs" in page.inner_text("#config")) == (number == 2)
        assert wrong == []


def test_keys_mouse_and_a_run_that_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", records(400), end=False)
    with serving(path) as client, opened(client.to.port) as (page, wrong):
        page.wait_for_selector("#charts canvas")
        page.wait_for_function("() => charts.get('lm loss')?.box")
        page.keyboard.press("s")
        page.keyboard.press("l")
        page.keyboard.press("x")
        page.keyboard.press("d")
        page.keyboard.press("?")
        assert page.evaluate("[view.smooth, view.logarithmic, view.axis]") == [10, True, "tokens"]
        assert page.evaluate("document.documentElement.className") == "dark" and page.is_visible("#keys")
        page.select_option("#axis", "step")
        page.locator("body").press("+")
        page.wait_for_function("() => view.end - view.first < 300 && runs[0].curves['lm loss'].at[0] > 50")
        page.locator("body").press("Escape")
        page.wait_for_function("() => view.end === 0 && runs[0].curves['lm loss'].at[0] === 1")
        canvas = page.locator("#charts canvas").first
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
        assert "lm loss\nstep " in page.inner_text("#tip")
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
        page.mouse.up()
        page.wait_for_function("() => view.end > 0 && view.end - view.first < 120")
        canvas.dblclick()
        page.wait_for_function("() => view.end === 0")
        page.mouse.move(5, 5)
        canvas.focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("() => view.cursor > 350 && !document.getElementById('tip').hidden")
        page.keyboard.press("Enter")
        page.wait_for_selector(".card.large")
        add(path, *(simple(i, 1.0) for i in range(401, 411)))
        page.wait_for_function("() => runs[0].iteration === 410")
        add(path, simple(300, 9.5))
        page.wait_for_function("() => runs[0].iteration === 300 && runs[0].marks.length === 1")
        assert page.evaluate("Math.max(...runs[0].curves['lm loss'].at)") == 300
        assert "rolled back at step 300" in page.inner_text("#runs")
        assert wrong == []
