"""The picture of `minimegatron watch` for the documents: a run that is trained for it, in a browser.

    python docs/watch_page.py              some 70 CPU-seconds; needs playwright, and a Chromium of the system

It trains a small model on two ranks for 120 steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minimegatron.watch.log import RunLog  # noqa: E402
from minimegatron.watch.predicted import Predictor  # noqa: E402
from minimegatron.watch.server import Server, Watched  # noqa: E402
from tests.notebooks.browser import FLAGS, chromium, missing  # noqa: E402

RUN = """--mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 256
    --global-batch-size 8 --micro-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel --train-iters 120
    --lr 1e-3 --lr-warmup-iters 20 --eval-interval 20 --eval-iters 2 --log-norms-interval 5 --log-timeline-interval 40
    --log-memory-interval 60"""


def train(log: Path) -> None:
    """Train the run; it writes its log there."""
    command = [sys.executable, "-m", "minimegatron", "torchrun", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "minimegatron", "train", *RUN.split(), "--log-file", str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=log.parent, env=environment, stdout=subprocess.DEVNULL, timeout=1200)


def picture(log: Path, path: Path) -> None:
    """Open the page of a log, and take a picture of all but its text."""
    from playwright.sync_api import sync_playwright

    with Server(Watched([RunLog(log)], Predictor()), 0) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        page.set_default_timeout(600_000)
        page.goto(server.address)
        page.wait_for_function("() => runs.length && runs.every(r => r.predicted && !r.predicted.pending && r.steps)")
        page.select_option("#smooth", "10")
        page.wait_for_timeout(3000)
        page.evaluate("document.querySelectorAll('#h-log, #h-config').forEach(h => h.parentNode.remove())")
        page.screenshot(path=str(path), full_page=True)
        browser.close()
        server.shutdown()


def main() -> int:
    if lack := missing():
        print(f"skipped: {lack}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "small", "run.jsonl")
        log.parent.mkdir()
        train(log)
        picture(log, ROOT / "docs/images/watch.png")
    print("docs/images/watch.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
