"""Tapes: what a forward pass keeps for the backward pass, operation by operation, in bytes.

The problem in a sentence: whether a model fits is decided by its activations as much as by its weights, and one wants
to know before there is a machine to try it on.

A `Step` is an operation: what it keeps for its backward pass, and what else is alive while it runs forward and
backward. A `Tape` is a list of steps, forward from the first to the last and backward again. So the memory is highest
at one step, and that step has a name:

    forward     kept so far + what this step keeps + its workspace
    backward    kept up to and with this step      + its workspace

Both are known from a run (`dry_run`). What cannot be run raises `Unpredicted`, whose text the table shows: what is not
predicted is said, and never left out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig
    from minimegatron.models.spec import ModuleSpec


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of it.
        keeps: bytes for the backward pass.
        forward, backward: bytes that are alive besides while it runs.
        puts_off: bytes that stay for the weights' half of a split backward pass.
    """

    name: str
    keeps: int = 0
    forward: int = 0
    backward: int = 0
    puts_off: int = 0


@dataclasses.dataclass(frozen=True)
class Moment:
    """The memory at one step.

    Attributes:
        kept: bytes kept for backward passes.
        workspace: bytes alive besides.
        where: `backward mlp.linear_fc1`.
    """

    kept: int
    workspace: int
    where: str

    @property
    def total(self) -> int:
        return self.kept + self.workspace


class Tape(tuple[Step, ...]):
    """Steps in the order of the forward pass."""

    @property
    def kept(self) -> int:
        """Bytes that all of it keeps."""
        return sum(step.keeps for step in self)

    @property
    def put_off(self) -> int:
        """Bytes that stay where the weights' half of the backward pass is put off."""
        return sum(step.puts_off for step in self)

    def highest(self, backward: bool, splits: bool = False) -> Moment:
        """The fullest moment on the way forward or back.

        Args:
            backward: the way.
            splits: the weights' half is put off.
        """
        kept, found = 0, [Moment(0, 0, "")]
        later = self.put_off if backward and splits else 0
        for step in self:
            kept += step.keeps
            later -= step.puts_off if backward and splits else 0
            way = f"{'backward' if backward else 'forward'} {step.name}"
            found.append(Moment(kept + later, step.backward if backward else step.forward, way))
        return max(found, key=lambda moment: moment.total)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One microbatch on one rank.

    Attributes:
        config, mesh: the model, and this rank's place.
        s, b: tokens of a sample that are here, samples.
        adds_products: a product of a linear layer is added to the buffer of gradients as it is computed; else the
            gradient of a weight exists by itself first, because the buffer has another dtype.
        documents: samples are made of documents that do not see each other.
        device: type of it.
        crowded: the experts of this rank get all tokens that they can, and not an equal share.
        spec: of each layer; default the model's.
    """

    config: TransformerConfig
    mesh: Mesh
    s: int
    b: int
    adds_products: bool = True
    documents: bool = False
    device: str = "cpu"
    crowded: bool = False
    spec: ModuleSpec | None = None

    @property
    def e(self) -> int:
        """Bytes of an element of a weight, and of an activation."""
        return self.config.dtype.itemsize

    @property
    def t(self) -> int:
        return self.mesh.tp.size

    @property
    def n(self) -> int:
        """Tokens between the two linear layers of a pair."""
        return self.s * self.b

    @property
    def n_cut(self) -> int:
        """Tokens in norms, dropout and residuals."""
        return self.n // (self.t if self.mesh.sequence_parallel else 1)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        wide = 4 if self.config.fp32_residual_connection else self.e
        return wide * self.n_cut * self.config.hidden_size


class Unpredicted(Exception):
    """What is not known, in words."""


def require_known(known: bool, what: str) -> None:
    """Raise `Unpredicted`, unless it is known."""
    if not known:
        raise Unpredicted(what)
