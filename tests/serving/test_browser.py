"""The chat page in a real browser: it streams, stops, says what is wrong, and asks nobody else.

Pictures stay in `build/browser/serving/`, for whoever wants to look.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from minimegatron.inference.engine import Engine, EngineConfig
from tests.inference.models import ours
from tests.notebooks import browser
from tests.serving.conftest import KEY, running
from tests.serving.waiting import wait_until

PICTURES = Path(__file__).resolve().parents[2] / "build" / "browser" / "serving"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "not skipped"),
]
# Every text that the newest answer has had.
WATCH = """() => { window.seen = []; new MutationObserver(() => {
    const text = [...document.querySelectorAll('.assistant')].at(-1)?.textContent ?? '';
    if (window.seen.at(-1) !== text) window.seen.push(text);
}).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true}) }"""


@pytest.fixture
def slow(tokenizer, monkeypatch):
    engine = Engine(ours("llama2"), EngineConfig(max_model_len=256, page_size=4, max_num_seqs=4, num_pages=128))
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.02), step())[1])
    with running(tokenizer, engine=engine) as server:
        server.service.stop_ids = frozenset()
        yield server


@pytest.fixture
def page(slow, tmp_path):
    """(page, complaints): on the server's page, without a key."""
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=browser.chromium(), headless=True, args=browser.FLAGS,
            viewport={"width": 900, "height": 700}, timeout=browser.START_SECONDS * 1000,
        )  # fmt: skip
        try:
            page = context.new_page()
            page.set_default_timeout(30_000)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda r: None if r.url.startswith(slow.url) else complaints.append(r.url))
            page.goto(slow.url + "/")
            page.evaluate(WATCH)
            yield page, complaints
        finally:
            context.close()


def picture(page, name):
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(PICTURES / f"{name}.png"))


def ask(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def over(page):
    page.wait_for_function("() => document.getElementById('stop').disabled")


def test_the_page_streams_stops_and_says_what_is_wrong(slow, page, monkeypatch):
    page, complaints = page
    page.wait_for_selector("#key")  # the server wants one, and the page shows where
    ask(page, "WITHOUT A KEY")
    page.wait_for_selector(".error")
    assert "API key" in page.inner_text(".error") and page.locator(".assistant").count() == 0
    picture(page, "1-no-key")

    page.fill("#key", KEY)
    page.press("#key", "Tab")
    page.wait_for_function("() => document.getElementById('model').textContent === 'tiny'")
    page.fill("#tokens", "40")
    ask(page, "WHO ARE YOU?")
    page.wait_for_function("() => /^40 tokens, /.test(document.getElementById('count').textContent)")
    seen = page.evaluate("() => window.seen.filter(text => text)")
    assert len(set(seen)) > 10 and all(b.startswith(a) for a, b in zip(seen, seen[1:], strict=False))
    over(page)
    picture(page, "2-answered")

    page.fill("#tokens", "150")
    ask(page, "TELL ME MORE")
    page.wait_for_function("() => document.querySelectorAll('.assistant').length == 2 && window.seen.at(-1).length > 3")
    picture(page, "3-streaming")
    page.click("#stop")
    over(page)
    wait_until(lambda: slow.service.thread.idle and slow.engine.scheduler.blocks.available == 128)
    kept = page.locator(".assistant").nth(1).inner_text()
    assert kept and slow.service.thread._seconds < 10, "what was there when it was stopped stays"

    def fail(batch):
        raise RuntimeError("out of memory")

    page.fill("#tokens", "20")  # of 256, how many of the 150 had come when it was stopped
    with monkeypatch.context() as broken:
        broken.setattr(slow.engine.runner, "run", fail)
        ask(page, "AND NOW?")
        page.wait_for_function("() => document.querySelectorAll('.error').length == 2")
    assert "out of memory" in page.locator(".error").nth(1).inner_text()
    picture(page, "4-error")

    nothing = 'data: {"choices": [{"delta": {"content": ""}}]}\n\ndata: [DONE]\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=nothing))
    ask(page, "NOTHING?")
    page.wait_for_selector(".empty")
    assert page.inner_text(".empty") == "(an empty answer)"
    over(page)
    page.unroute("**/v1/chat/completions")

    page.click("#clear")
    assert page.locator("#log > div").count() == 0
    page.fill("#tokens", "")  # as it is when the page opens: all that fit
    ask(page, "<b>HI</b>")
    page.wait_for_function("() => /^2\\d\\d tokens, /.test(document.getElementById('count').textContent)")
    assert page.locator(".user").inner_text() == "<b>HI</b>" and page.locator(".user b").count() == 0
    assert complaints == []
