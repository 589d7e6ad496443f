"""What observers of a training are told, in which order, and that closing goes backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from minimegatron.training.observers import Observer, Step
from tests.training.test_bad_steps import trainer_with


class Notes(Observer):
    """Writes down what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def begin(self, done: int) -> None:
        self.told.append(f"{self.name} begin {done}")

    def before_step(self, done: int) -> None:
        self.told.append(f"{self.name} before {done}")

    @contextlib.contextmanager
    def during_step(self, done: int) -> Iterator[None]:
        self.told.append(f"{self.name} into {done}")
        yield
        self.told.append(f"{self.name} out of {done}")

    def before_update(self) -> None:
        self.told.append(f"{self.name} update")

    def after_step(self, step: Step) -> None:
        kind = "bad" if step.report is None else "good"
        self.told.append(f"{self.name} {kind} {step.iteration}{' last' if step.last else ''}: {step.first}")

    def end(self, done: int, reason: str) -> None:
        self.told.append(f"{self.name} end {done}: {reason}")

    def close(self) -> None:
        self.told.append(f"{self.name} close")


def test_every_moment_is_told_in_the_order_of_the_list() -> None:
    told: list[str] = []
    trainer: Any = trainer_with("--bad-step skip --exit-interval 2", 1, {5: float("nan")})[0]  # in the second step
    trainer.observers = [*trainer.observers, Notes("a", told), Notes("b", told)]
    trainer.train()
    trainer.close()
    moments = [
        "begin 0", "before 0", "into 0", "update", "good 1: 0", "before 1", "into 1", "bad 2 last: 4",
        "end 2: --exit-interval 2",
    ]  # fmt: skip
    expected = [f"{name} {moment}" for moment in moments for name in "ab"]
    for number, after in ((0, "update"), (1, "into 1")):
        at = expected.index(f"b {after}") + 1
        expected[at:at] = [f"b out of {number}", f"a out of {number}"]
    assert told == [*expected, "b close", "a close"]
