"""A training without a model: ranks that are processes, a log, checkpoints of numbers, and faults that one asks for.

    python -m tests.course.fake_training SAVE LOG SEED CONFIG RANKS STEPS EVERY 'fault, fault'
    python -m tests.course.fake_training export SAVE MODEL

The loss of a step is a function of the state before it and of the samples that it reads, as in a training. The numbers
are those that `FakeJudge` expects.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SIZE, SECONDS, PAUSE = 4, 0.002, 1.0  # samples of a step; of its computation; for a busy machine to kill a rank


def loss_of(state: int, first: int) -> float:
    """Of a step that reads samples first ... first + SIZE - 1 with these weights."""
    return 5.0 + (state * 31 + first * 17 + state * first * 7) % 1009 / 1009


def after(state: int, first: int) -> int:
    """The weights after it."""
    return (state * 131 + first + 1) % 100_003


def saved(save: Path) -> dict:
    """The newest checkpoint."""
    return json.loads(max(save.glob("iter_*.json")).read_text())


def main(save: Path, log: Path, seed: int, config: Path, ranks: int, steps: int, every: int, faults: str) -> int:
    others = []
    for number in range(ranks):
        environment = {**os.environ, "RANK": str(number)}
        line = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        others.append(subprocess.Popen(line, env=environment))
    signal.signal(signal.SIGTERM, lambda *_: [other.kill() for other in others] and sys.exit(143))
    save.mkdir(parents=True, exist_ok=True)
    begin = {"iteration": 0, "state": seed % 1000, "samples": 0}
    if list(save.glob("iter_*.json")) and "does not load" not in faults:
        begin = saved(save)
        begin["state"] += "forgets its moments" in faults
        begin["samples"] = 0 if "begins the data again" in faults else begin["samples"]
        begin["samples"] += SIZE * ("leaves a batch out" in faults) - SIZE * ("reads a batch twice" in faults)
    state, samples = begin["state"], begin["samples"]
    with open(log, "a", encoding="utf-8") as file:
        file.write(config.read_text().strip() + "\n")
        for step in range(begin["iteration"] + 1, steps + 1):
            time.sleep(SECONDS)
            pause = time.monotonic() + PAUSE if step == 3 * steps // 4 else 0.0
            while time.monotonic() < pause and not any(other.poll() is not None for other in others):
                time.sleep(0.01)
            if any(other.poll() is not None for other in others):
                for other in others if "leaves ranks behind" not in faults else ():
                    other.kill()
                if "hides its end" in faults:
                    return 0
                return 5
            loss = (
                loss_of(state, samples)
                + 1e-9 * (ranks == 2)
                + time.time() % 1e-6 * ("is never twice the same" in faults)
            )
            rate = 0.1 * min(1.0, step / 5) * (1 - step / 1000)
            state, samples = after(state, samples), samples + SIZE
            record = {"event": "train", "iteration": step, "losses": {"lm loss": loss}, "grad_norm": 1 / (1 + state)}
            record |= {"learning_rate": rate, "global_batch_size": SIZE, "memory_by_owner": {"parameters": 1000}}
            file.write(json.dumps(record) + "\n")
            file.flush()
            if step % every == 0 or step == steps:
                kept = {"iteration": step, "state": state, "samples": samples}
                (save / "new.json").write_text(json.dumps(kept))
                os.replace(save / "new.json", save / f"iter_{step:07d}.json")
    for other in others:
        other.kill()
    return 0


def export(save: Path, model: Path) -> int:
    """A model is the checkpoint."""
    model.write_text(json.dumps(saved(save)))
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "export":
        sys.exit(export(Path(words[1]), Path(words[2])))
    sizes = (int(word) for word in words[4:7])
    sys.exit(main(Path(words[0]), Path(words[1]), int(words[2]), Path(words[3]), *sizes, words[7]))
