"""Bytes of a pipeline stage from end to end: what its parts keep, and its fullest moment forward and backward."""

from __future__ import annotations

import dataclasses
import functools

from minimegatron.footprint.dry_run import StageRun
from minimegatron.footprint.tape import Sizes
from minimegatron.footprint.traffic import Travel
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.data.ddp import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Fullest:
    """A candidate for the fullest moment of a step: what is alive beyond the states."""

    activations: int
    workspace: int
    communication: int
    where: str

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.communication


class Stage:
    """A stage of the model: its tapes in the order in which they run, and what travels around each.

    Args:
        model: the stage.
        z: a microbatch.
        ddp: whose buckets come and go.
    """

    def __init__(self, model: GPTModel, z: Sizes, ddp: DistributedDataParallel) -> None:
        self._model, self._z = model, z
        run = StageRun(model, z)
        self.parts, self.lasting, self.expects = run.parts, run.lasting, run.expects
        alone = model.pre_process and model.post_process
        self._message = 0 if alone else z.e * z.n_cut * z.config.hidden_size  # the next one arrives meanwhile
        self._travel = Travel(ddp, [numbers for numbers, _ in self.parts])
        self._highest: dict[tuple[bool, bool], Fullest] = {}

    @functools.cached_property
    def _split(self) -> StageRun:
        """Where the weights' half of the backward pass is put off."""
        return StageRun(self._model, self._z, splits=True)

    @property
    def kept(self) -> int:
        """Bytes of a microbatch between its forward and its backward pass."""
        return sum(tape.kept for _, tape in self.parts)

    @property
    def put_off(self) -> int:
        """Bytes of a microbatch between the two halves of a split backward pass."""
        return sum(tape.put_off for _, tape in self._split.parts)

    def weights_half(self) -> Fullest:
        """The fullest moment of the weights' half of a backward pass: one gradient exists before it is added up."""
        return Fullest(self.put_off, self._split.weights, 0, "weights' half")

    def highest(self, backward: bool, splits: bool = False) -> Fullest:
        """The fullest moment of a pass; see `Tape.highest`."""
        if (backward, splits) not in self._highest:
            found = self.moments(backward, splits)
            self._highest[backward, splits] = max(found, key=lambda moment: moment.total)
        return self._highest[backward, splits]

    def moments(self, backward: bool, splits: bool = False) -> list[Fullest]:
        """The fullest moment of each part, from the first part of the stage to the last."""
        kept, found = 0, []
        later = self.put_off if splits and backward else 0
        for i, (numbers, tape) in enumerate(self._split.parts if splits else self.parts):
            here = tape.highest(backward, splits)
            later -= tape.put_off if splits and backward else 0
            layer = f", layer {'-'.join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))}" if numbers else ""
            found.append(
                Fullest(
                    kept + later + here.kept,
                    here.workspace + self._message * backward,
                    self._travel.at(i, backward),
                    here.where + layer,
                )
            )
            kept += tape.kept
        return found
