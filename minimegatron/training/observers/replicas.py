"""Copies of weights, compared bit by bit every `--check-replicas-interval` steps (`comm/fingerprints`)."""

from __future__ import annotations

import torch

from minimegatron.comm.fingerprints import check_copies
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import copy_axes, layout_of, logical_parameters
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.observers import Observer, Step
from minimegatron.training.reports import StepReport


class ReplicaCheck(Observer):
    """Compares every parameter with its copies on other ranks, and what each rank has moved its own part by.

    Args:
        model: whose parameters.
        mesh: its layout.
        interval: steps between comparisons; None for none.
    """

    def __init__(self, model: DataParallel, mesh: Mesh, interval: int | None) -> None:
        self.model, self.mesh, self.interval = model, mesh, interval
        self._report: StepReport | None = None  # of the last good step

    def after_step(self, step: Step) -> None:
        """Compare if it is time to.

        Raises:
            RankError: copies differ.
        """
        self._report = step.report or self._report
        if self.interval and step.iteration % self.interval == 0:
            self.check()

    def check(self) -> None:
        world = self.mesh.world
        decided = {
            f"the {name} of the step": torch.tensor(value, dtype=torch.float64, device=self.mesh.device)
            for report in (self._report,)
            if report is not None
            for name, value in report.decided().items()
        }
        with self.model.whole_weights():
            held = logical_parameters(self.model)
            copies = {n: (p, copy_axes(layout_of(p), self.mesh)) for n, p in held}
            check_copies({**copies, **{name: (value, [world]) for name, value in decided.items()}}, world)
