"""Bytes of a transformer layer, of what is recomputed as a whole, and of a pipeline stage from end to end."""

from __future__ import annotations

import dataclasses

from torch import nn

from minimegatron.footprint.attention import table
from minimegatron.footprint.dense import kept_of_input, loss, replicated
from minimegatron.footprint.dry_run import stage_by_run
from minimegatron.footprint.tape import Sizes, Step, Tape, Unpredicted, formula, require_known, tape_of
from minimegatron.footprint.traffic import Travel
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.norm import Norm
from minimegatron.models.block import TransformerLayer
from minimegatron.models.decoder import GPTModel
from minimegatron.models.mtp import PredictionLayer
from minimegatron.parallel.ddp import DistributedDataParallel

Part = tuple[tuple[int, ...], Tape]  # numbers of layers that run as a whole, and their steps


@formula(TransformerLayer)
def layer(module: TransformerLayer, z: Sizes) -> Tape:
    """Recomputed where the configuration says so for single modules."""
    config, drop = z.config, tape_of(module.dropout, z)
    for norm in (module.post_self_attn_layernorm, module.post_mlp_layernorm):
        require_known(type(norm) is nn.Identity, "norms of outputs")
    inside = tape_of(module.mlp, z)
    if config.recomputes("moe" if config.has_experts(module.layer_number) else "mlp"):
        inside = Tape([inside.recomputed("mlp", z.stream)])
    steps = [
        *_norm(module.input_layernorm, z, "norm"),
        *tape_of(module.self_attention, z),
        *drop,
        *_norm(module.pre_mlp_layernorm, z, "norm 2"),
        *inside,
        *drop,
    ]
    return Tape(steps).during_backward(z.stream)  # the stream's own gradient waits


def _norm(module: nn.Module, z: Sizes, name: str) -> Tape:
    tape = _named(module, z, name)
    if z.config.recomputes("layernorm") and isinstance(module, Norm):
        return Tape([tape.recomputed(name, z.stream, kept_of_input(module, z.stream, z))])
    return tape


def _named(module: nn.Module | None, z: Sizes, name: str) -> Tape:
    assert module is not None, f"{name} is here"
    return Tape(dataclasses.replace(step, name=name) for step in tape_of(module, z))


def layers(model: GPTModel, z: Sizes) -> list[Part]:
    """The layers of a stage in groups that run as a whole."""
    found: list[Part] = []
    for group, again in model.decoder.groups(list(model.decoder.layers.values())):
        tapes = [(number_of(one), tape_of(one, z)) for one in group]
        if not again:
            found += [((number,), tape) for number, tape in tapes]
        elif group:
            numbers = tuple(number for number, _ in tapes)
            inside, own = Tape(step for _, tape in tapes for step in tape), group[0].input_layernorm
            shared = kept_of_input(own, z.stream, z) if isinstance(own, Norm) else 0
            found.append((numbers, Tape([inside.recomputed("recomputed", z.stream, shared)])))
    return found


def number_of(module: nn.Module) -> int:
    """The global number of a layer."""
    if not isinstance(module, TransformerLayer):
        raise Unpredicted(type(module).__name__)
    return module.layer_number


def batch(model: GPTModel, z: Sizes) -> Step:
    """What every stage has of a microbatch: ids, labels, mask, angles."""
    config = z.config
    shared = config.rotates and (z.e == 4 or z.own_kernels)  # else layers keep them rounded
    angles = 4 * z.n * config.rotary_channels if shared else 0
    return Step("batch", (28 if z.documents else 20) * z.n + angles + table(z))


def ends(model: GPTModel, z: Sizes) -> tuple[Tape, Tape]:
    """What runs before the layers of a stage, and what runs behind them."""
    first = tape_of(model.embedding, z) if model.pre_process and model.embedding is not None else _arrives(model, z)
    if not model.post_process:
        return Tape([batch(model, z), *first]), Tape()
    head = model.output_layer or getattr(model.embedding, "word_embeddings", None)
    assert head is not None, "a last stage has an output layer or the table"
    require_known(z.config.final_logit_softcapping is None, "capped logits")
    one = loss(head.weight, z)
    steps = [*_named(model.decoder.final_layernorm, z, "final norm"), *one]
    for depth in model.mtp.layers if model.mtp is not None else ():
        steps += [*tape_of(model.embedding, z), *tape_of(depth, z), *one]  # type: ignore[arg-type]
    return Tape([batch(model, z), *first]), Tape(steps)


@formula(PredictionLayer)
def prediction_layer(module: PredictionLayer, z: Sizes) -> Tape:
    """One depth of `models/mtp`, which is recomputed as a whole or not at all."""
    states = _named(module.hnorm, z, "norm of states")[0]
    states = dataclasses.replace(states, keeps=states.keeps - kept_of_input(module.hnorm, z.stream, z))  # output's
    steps = [
        *_named(module.enorm, z, "norm of tokens"),
        states,
        replicated("eh_proj", module.eh_proj, z),
        *tape_of(module.transformer_layer, z),
    ]
    inside = Tape([*steps, *_named(module.final_layernorm, z, "final norm")])
    if z.config.recompute_granularity == "full" and z.config.recompute_method == "uniform":
        return Tape([inside.recomputed("depth", z.stream, kept_of_input(module.enorm, z.stream, z))])
    return inside


def _arrives(model: GPTModel, z: Sizes) -> Tape:
    """What the stage before has sent; the first norm may keep it anyway."""
    norms = [m for m in model.decoder.modules() if isinstance(m, Norm)][:1]
    kept = kept_of_input(norms[0], z.stream, z) if norms else 0
    return Tape([Step("input", z.stream - kept)])


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
        alone = model.pre_process and model.post_process
        self._message = 0 if alone else z.e * z.n_cut * z.config.hidden_size  # the gradient that came, or goes
        self._split: list[Part] | None = None  # of a pass whose weights' half is put off, where it has to be run
        try:
            begin, end = ends(model, z)
            self.parts: list[Part] = [((), begin), *layers(model, z), ((), end)]
            self._split = self.parts
        except Unpredicted:  # of a module without a formula
            self.parts = self._run(False)
        weights = [m.weight.numel() for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
        self._weight = z.e * max(weights, default=0)
        self._travel = Travel(ddp, [numbers for numbers, _ in self.parts])
        self._highest: dict[tuple[bool, bool], Fullest] = {}

    def _run(self, splits: bool) -> list[Part]:
        numbers, tapes = stage_by_run(self._model, self._z, splits)
        return list(zip([(), *numbers, ()], tapes, strict=True))

    @property
    def split_parts(self) -> list[Part]:
        """The same where the weights' half of the backward pass is put off."""
        if self._split is None:
            self._split = self._run(True)
        return self._split

    @property
    def kept(self) -> int:
        """Bytes of a microbatch between its forward and its backward pass."""
        return sum(tape.kept for _, tape in self.parts)

    @property
    def put_off(self) -> int:
        """Bytes of a microbatch between the two halves of a split backward pass."""
        return sum(tape.put_off for _, tape in self.split_parts)

    def weights_half(self) -> Fullest:
        """The fullest moment of the weights' half of a backward pass: one gradient exists before it is added up."""
        return Fullest(self.put_off, self._weight, 0, "weights' half")

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
        for i, (numbers, tape) in enumerate(self.split_parts if splits else self.parts):
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
