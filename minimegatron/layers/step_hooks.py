"""Step hooks: the work of a model's features at fixed moments of a training step, one method for each moment.

The step calls the hooks of all features alike, so it need not know a feature by name:

    moment                                  method                   example
    before the forward and backward passes  begin_step(scale)        routers get the scale of the loss
    around them                             during_passes()          quantised weights are kept
    before losses are summed over ranks     reports()                losses of multi-token prediction
                                            table()                  counts that the host reads in the same message
    after that message                      report_fields(numbers)   fields of the step's report, from the table
    after the optimizer's update            end_step()               biases of experts are updated

`@step_hook` registers a hook where its class is defined. The file that defines a feature's modules is imported
wherever a model has them, so `StepHooks(model, mesh)` has every hook that the model can need; a hook for which the
model has no modules does nothing. Hooks are called in the order of their names, hence equally on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh


class StepHook:
    """One feature's work; every method here does nothing.

    Args:
        model: the model of this rank, in its data-parallel wrapper.
        mesh: its layout.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh

    def begin_step(self, scale: float) -> None:
        """Called before the passes; `scale` is the factor of the loss before `backward`."""

    def during_passes(self) -> contextlib.AbstractContextManager[None]:
        """Entered before the first pass, left after the last one, also when one of them raises."""
        return contextlib.nullcontext()

    def reports(self) -> dict[str, torch.Tensor]:
        """More losses of this rank: name -> [sum, count] in fp64."""
        return {}

    def table(self) -> torch.Tensor | None:
        """Numbers in fp64, equal on all ranks, that the host reads together with the losses; None for none."""
        return None

    def report_fields(self, numbers: list[float]) -> dict[str, Any]:
        """Fields of the step's report (`training.reports.StepReport`) from the numbers of `table`, flat."""
        return {}

    def end_step(self) -> None:
        """Called after the optimizer, also if it has skipped the step: counts of the passes are reset."""


REGISTERED: dict[str, type[StepHook]] = {}


def step_hook(hook: type[StepHook]) -> type[StepHook]:
    """Class decorator: every training step has this hook."""
    REGISTERED[f"{hook.__module__}.{hook.__qualname__}"] = hook
    return hook


class StepHooks:
    """All hooks of a model.

    Args:
        model: the model of this rank, in its data-parallel wrapper.
        mesh: its layout.
        hooks: the hooks; default one of each registered class.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, hooks: Sequence[StepHook] | None = None) -> None:
        self.hooks = [REGISTERED[name](model, mesh) for name in sorted(REGISTERED)] if hooks is None else list(hooks)
        self._with_table: list[StepHook] = []

    @contextlib.contextmanager
    def passes(self, scale: float) -> Iterator[None]:
        """The forward and backward passes of a step run inside; see `StepHook.begin_step` and `during_passes`."""
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                hook.begin_step(scale)
                stack.enter_context(hook.during_passes())
            yield

    def reports(self) -> dict[str, torch.Tensor]:
        """The losses of all hooks."""
        return {name: pair for hook in self.hooks for name, pair in hook.reports().items()}

    def tables(self) -> list[torch.Tensor]:
        """The tables of the hooks that have one."""
        pairs = [(hook, table) for hook in self.hooks if (table := hook.table()) is not None]
        self._with_table = [hook for hook, _ in pairs]
        return [table for _, table in pairs]

    def report_fields(self, tables: list[list[float]]) -> dict[str, Any]:
        """The fields of all hooks, from the numbers of `tables()`, in that order."""
        pairs = zip(self._with_table, tables, strict=True)
        return {name: value for hook, numbers in pairs for name, value in hook.report_fields(numbers).items()}

    def end_step(self) -> None:
        """Call `end_step` of all hooks."""
        for hook in self.hooks:
            hook.end_step()
