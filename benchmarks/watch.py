"""What watching costs: the run that is watched, and whoever looks at the page.

    OMP_NUM_THREADS=1 python -m benchmarks.watch            both, some three minutes
    OMP_NUM_THREADS=1 python -m benchmarks.watch --smoke    the same code on tiny sizes

| part | what                                                                                                      |
|------|-----------------------------------------------------------------------------------------------------------|
| run  | CPU-seconds that each observer takes in a step that it looks at, over those of a step without it          |
| page | a log of 100,000 steps and 64 ranks: CPU-seconds to read it, memory, CPU-milliseconds of an answer; and   |
|      | in Chromium, if `playwright` is there: seconds until the first curve, until all, and of an update         |

The observers are called by the trainer between the parts of a step, so their CPU-seconds are taken around the calls,
in the same steps as those of the step itself: no second run has to be as fast as the first. Recording a timeline is
work inside of a step, too; it is the number of events times the CPU-seconds of one, taken by itself. A run of many
steps looks at each N-th: the share of all is the cost of such a step over N steps (`USUAL`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minimegatron.watch.log import RunLog
from minimegatron.watch.server import Server, Watched, as_json
from tests.watch.generated import records, write

USUAL = {"Metrics": 10, "Norms": 100, "Timeline": 1000}  # steps between two that an observer looks at
LINE = "--preset laptop-10m --mock-data --seq-length 256 --global-batch-size 8 --micro-batch-size 4 --lr 1e-3"
TINY = "--mock-data --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 --lr 1e-3"


def observers(smoke: bool, steps: int) -> None:
    """Print what each observer costs, in so many steps."""
    import torch

    from minimegatron import trace
    from minimegatron.training.arguments import parse_args
    from tests.mock_data import small_trainer

    torch.set_num_threads(1)
    spent: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        every = "--log-interval 1 --log-norms-interval 1 --log-timeline-interval 1"
        line = f"{TINY if smoke else LINE} {every} --train-iters {steps} --log-file {folder}/run.jsonl"
        trainer = small_trainer(parse_args(f"{line} --tensorboard-dir {folder}/board".split()))
        for observer in trainer.observers:
            for method in ("before_step", "before_update", "after_step"):
                taken = functools.partial(_timed, getattr(observer, method), spent[type(observer).__name__])
                setattr(observer, method, taken)
        first, marks = trainer.observers[0], list[float]()
        first.before_step = functools.partial(_noted, first.before_step, marks)
        with contextlib.redirect_stdout(None):
            trainer.train()
        trainer.close()
        log = RunLog(Path(folder, "run.jsonl"))
        log.read(60)
        count = len(log.latest["timeline"]["ranks"][0])
    watching = sum(map(sum, spent.values())) / steps
    step = statistics.median(b - a for a, b in itertools.pairwise(marks[1:])) - watching
    print(f"a step: {step:.4f} CPU-s without observers")
    one = _event(trace)
    share = 0.0
    for name, interval in USUAL.items():
        calls = spent[name]
        each = statistics.median(sum(calls[i : i + 3]) for i in range(3, len(calls), 3))  # three calls a step
        each += count * one if name == "Timeline" else 0.0
        share += each / interval / step
        print(f"{name}: {1000 * each:.2f} CPU-ms in a step that it looks at ({each / step:.2%} of it), "
              f"every {interval}: {each / interval / step:.4%} of a run")  # fmt: skip
    print(f"all of them: {share:.3%} of a run (a timeline has {count} events of {1e6 * one:.1f} CPU-us)")


def _noted(call: Any, into: list[float], *args: Any) -> None:
    into.append(time.process_time())
    call(*args)


def _timed(call: Any, into: list[float], *args: Any) -> Any:
    begun = time.process_time()
    try:
        return call(*args)
    finally:
        into.append(time.process_time() - begun)


def _event(trace: Any, number: int = 20_000) -> float:
    """CPU-seconds of a recorded span above one that nobody records."""

    def spans() -> float:
        begun = time.process_time()
        for _ in range(number):
            with trace.span("forward"):
                pass
        return time.process_time() - begun

    plain = spans()
    with trace.record():
        return (spans() - plain) / number


def page(path: Path) -> None:
    """Print what the server needs for a log."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = RunLog(path)
    begun = time.process_time()
    while log.behind or not log.size:
        log.read()
    read = time.process_time() - begun
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    steps = sum(map(len, log.columns.values()))
    size = path.stat().st_size / 2**20
    print(f"{size:.0f} MiB, {log.iteration:,} steps: read in {read:.2f} CPU-s, {steps:,} numbers in {grown:.0f} MiB")
    watched = Watched([])
    for what, smooth, known in (
        ("all curves", 0, False),
        ("smoothed over 1,000 steps", 1000, False),
        ("news", 0, True),
    ):
        costs, size = [], 0
        for _ in range(9):
            whole = watched._news(log, {"smooth": smooth})
            asked = {"generation": log.generation, "since": whole["next"], "width": whole["width"], "lines": log.seq}
            begun = time.process_time()
            size = len(as_json(watched._news(log, asked if known else {"smooth": smooth})))
            costs.append(time.process_time() - begun)
        print(f"{what}: {1000 * statistics.median(costs):.1f} CPU-ms, {size / 1024:.0f} KiB")


@contextlib.contextmanager
def serving(path: Path) -> Iterator[str]:
    with Server(Watched([RunLog(path)]), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.address
        server.shutdown()


def in_browser(path: Path, steps: int) -> None:
    """Print what somebody sees who opens the page."""
    from playwright.sync_api import sync_playwright

    from tests.notebooks.browser import FLAGS, chromium

    with serving(path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(300_000)
        begun = time.monotonic()
        tab.goto(address)
        tab.wait_for_function("() => typeof charts !== 'undefined' && charts.get('lm loss')?.box")
        first = time.monotonic() - begun
        tab.wait_for_function(f"() => runs[0].iteration === {steps} && runs[0].read[0] === 0")
        whole = time.monotonic() - begun
        measured = tab.evaluate("""async () => {
            const median = list => list.sort((a, b) => a - b)[list.length >> 1], asked = [], shown = [];
            for (let i = 0; i < 15; i++) {
                const begun = performance.now();
                await ask(runs[0], 0);
                asked.push(performance.now() - begun);
                const drawing = performance.now();
                show();
                charts.forEach(chart => chart.shown && draw(chart));
                shown.push(performance.now() - drawing);
            }
            return [median(asked), median(shown)] }""")
        browser.close()
    print(f"first curve after {first:.2f} s, the whole log after {whole:.2f} s; "
          f"an update: {measured[0]:.0f} ms for the answer, {measured[1]:.0f} ms to draw")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.watch", description="What watching costs.")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--only", choices=("run", "page"))
    parser.add_argument("--steps", type=int, default=14, help="that are trained, the first of which does not count")
    options = parser.parse_args()
    if options.only != "page":
        observers(options.smoke, 4 if options.smoke else options.steps)
    if options.only == "run":
        return
    steps, ranks, layers = (2000, 8, 4) if options.smoke else (100_000, 64, 64)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "run.jsonl"), records(steps, world=ranks, layers=layers))
        page(path)
        try:
            import playwright  # noqa: F401
        except ImportError:
            print("no browser: pip install playwright, and a Chromium")
            return
        if shutil.which("chromium"):
            in_browser(path, steps)


if __name__ == "__main__":
    main()
