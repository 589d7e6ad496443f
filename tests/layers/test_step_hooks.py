"""Hooks are called in one order, lose no table, and end what they began."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import minimegatron.training.step  # noqa: F401  (registers what a step needs)
from minimegatron.comm.mesh import Mesh
from minimegatron.layers import step_hooks
from minimegatron.layers.step_hooks import StepHook, StepHooks

MODEL, MESH = nn.Linear(1, 1), Mesh.serial()


class Notes(StepHook):
    """Writes down what is called."""

    def __init__(self, name: str, seen: list[str], table: list[float] | None = None) -> None:
        super().__init__(MODEL, MESH)
        self.name, self.seen, self.numbers = name, seen, table

    def begin_step(self, scale: float) -> None:
        self.seen.append(f"{self.name} begins {scale}")

    @contextlib.contextmanager
    def during_passes(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.seen.append(f"{self.name} leaves")

    def table(self) -> torch.Tensor | None:
        return None if self.numbers is None else torch.tensor(self.numbers)

    def report_fields(self, numbers: list[float]) -> dict[str, Any]:
        return {self.name: numbers}

    def end_step(self) -> None:
        self.seen.append(f"{self.name} ends")


def test_the_moments_of_a_step():
    seen: list[str] = []
    hooks = StepHooks(MODEL, MESH, [Notes("a", seen, [1.0]), Notes("b", seen), Notes("c", seen, [2.0, 3.0])])
    with hooks.passes(4.0):
        seen.append("passes")
    tables = [table.tolist() for table in hooks.tables()]
    assert hooks.report_fields(tables) == {"a": [1.0], "c": [2.0, 3.0]}
    hooks.end_step()
    assert seen[:4] == ["a begins 4.0", "b begins 4.0", "c begins 4.0", "passes"]
    assert sorted(seen[4:7]) == ["a leaves", "b leaves", "c leaves"]
    assert seen[7:] == ["a ends", "b ends", "c ends"]


def test_what_was_begun_ends_when_a_pass_raises():
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError), StepHooks(MODEL, MESH, [Notes("a", seen)]).passes(1.0):
        raise ZeroDivisionError
    assert seen == ["a begins 1.0", "a leaves"]


def test_the_order_does_not_depend_on_imports(monkeypatch):
    """Hooks may have messages, so all ranks call them in one order."""
    assert "minimegatron.layers.moe.balance.Balance" in step_hooks.REGISTERED, "train_step alone registers the routers'"
    names = list(step_hooks.REGISTERED)
    found = []
    for seed in range(4):
        random.Random(seed).shuffle(names)
        monkeypatch.setattr(step_hooks, "REGISTERED", {name: step_hooks.REGISTERED[name] for name in names})
        found.append([type(hook).__name__ for hook in StepHooks(MODEL, MESH).hooks])
    assert all(order == found[0] for order in found)


def test_a_model_without_features_has_nothing_to_do():
    hooks = StepHooks(MODEL, MESH)
    with hooks.passes(1.0):
        pass
    assert hooks.reports() == {} and hooks.tables() == [] and hooks.report_fields([]) == {}
    hooks.end_step()
