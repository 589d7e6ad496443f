"""The part of a model that one pipeline rank holds: one or several stages of it.

Every model of the package is built here. `build_stage` makes one stage, of the class with `is_stage` that the spec
names, else of `stage_class`: what `model_class` names, else what a field of `CLASSES` asks for, else a `GPTModel`.
Nothing outside of `models` knows which class it is; who needs more asks it (`contract.StageClass`).

A rank of a pipeline with p ranks and v chunks holds v stages. `StagePlan` (`config/stages`) says which layers a
stage has, the placement of the schedule which stages a rank has:

    L = 8, p = 2, v = 2, round robin            V-shaped
    rank 0   E 0 1        4 5                   E 0 1        6 7 L
    rank 1        2 3         6 7 L                  2 3 4 5

Layers keep their global numbers, so a parameter has the same name in every layout.

**Tied weights.** A tied output layer uses the embedding's matrix, and multi-token prediction (`models/mtp`) embeds
tokens once more, positions included. In a pipeline the embedding is on the first stage and they are on the last:

    both stages on one rank (V-shaped)    they share the tensor
    on two ranks                          the last has a copy with the same initial values, as it has the same name;
                                          gradients of the two are summed (`parallel/data/finalize`), so the copies stay
                                          equal; the copy is counted in no norm and saved in no checkpoint

Megatron-LM: `get_model` in `megatron/training/training.py`, `setup_embeddings_and_output_layer` in
`megatron/core/models/common/language_module/language_module.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.comm.random import RngStreams
from minimegatron.config.model import TransformerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.errors import ConfigError, require
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.bert import BertModel
from minimegatron.models.contract import StageClass
from minimegatron.models.decoder import GPTModel
from minimegatron.models.encoder_decoder import EncoderDecoderModel
from minimegatron.models.families import FAMILIES
from minimegatron.models.spec import ModuleSpec, build_module, named_class
from minimegatron.models.vision import VisionLanguageModel
from minimegatron.parallel.pipeline.actions import Placement
from minimegatron.parallel.pipeline.schedule_check import require_runnable
from minimegatron.parallel.pipeline.schedules import SCHEDULES, Schedule, build_schedule, forward_only

CLASSES: dict[str, type[StageClass]] = {  # field that is set -> class
    "encoder_num_layers": EncoderDecoderModel,
    "bert_head": BertModel,
    "vision_num_layers": VisionLanguageModel,
}


def stage_class(config: TransformerConfig, spec: ModuleSpec | None = None) -> Any:
    """The class of a model's stages: a `contract.StageClass`.

    Raises:
        ConfigError: the spec, or `model_class`, names none.
    """
    found: Any = next((of for field, of in CLASSES.items() if getattr(config, field) is not None), GPTModel)
    if spec is not None and getattr(spec.module, "is_stage", False):
        found = spec.module
    elif config.model_class is not None:
        require(  # no file may name code that is then imported
            config.model_class in {family.fields.get("model_class") for family in FAMILIES.values()},
            f"model_class {config.model_class} is named by no family",
            "import the module that registers the family (models/families); --spec names a class without one",
        )
        found = named_class(config.model_class, "model_class")
    require(
        isinstance(found, type) and issubclass(found, StageClass),
        f"{getattr(found, '__qualname__', found)} is no class of stages",
        "a subclass of GPTModel, or of models.contract.StageClass",
    )
    return found


def build_stage(
    config: TransformerConfig,
    mesh: Mesh,
    spec: ModuleSpec | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    layer_numbers: Sequence[int] | None = None,
    rng: RngStreams | None = None,
) -> Any:
    """One stage of a model, or all of it, without initial values: a `contract.ModelStage`.

    Args:
        config: the model.
        mesh: its layout.
        spec: the spec of the stage, if its class has `is_stage`; else of each layer of a `GPTModel`, default
            `decoder_layer_spec`.
        pre_process: whether it is the first stage.
        post_process: whether it is the last stage.
        layer_numbers: global numbers of its layers; default all.
        rng: dropout streams; needed when the model has dropout.

    Raises:
        ConfigError: the model does not fit the layout.
    """
    where: dict[str, Any] = {"pre_process": pre_process, "post_process": post_process, "layer_numbers": layer_numbers}
    if spec is not None and getattr(spec.module, "is_stage", False):
        stage: Any = build_module(spec, config, mesh, **where, rng=rng)
    else:
        stage = stage_class(config)(config, mesh, spec, **where, rng=rng)
    if pre_process != post_process:
        declare_copies(stage)
    return stage


def declare_copies(stage: Any) -> None:
    """Mark the tied weights of the first or the last stage as having copies at the other end."""
    for name, (module, attribute) in stage.tied_weights().items():
        copy = {} if stage.pre_process else {"shared": True, "tied_to": name}
        weight = getattr(module, attribute)
        weight.param_layout = dataclasses.replace(layout_of(weight), copies="embd", **copy)  # type: ignore[arg-type]


class ModelChunks(nn.Module):
    """The stages of one pipeline rank, in the order of their chunks.

    Args:
        config: the model.
        mesh: its layout.
        spec: the spec of a stage or of each layer, see `build_stage`.
        rng: dropout streams.
        placement: which rank has which stages; default that of the configured schedule.

    Attributes:
        chunks: the stages.
        plan, placement: how the model is cut, and which rank has which stage.
        mail: messages to the other ranks of the pipeline.

    Raises:
        ConfigError: the model does not fit the layout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        spec: ModuleSpec | None = None,
        rng: RngStreams | None = None,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.plan: StagePlan = plan_stages(mesh.parallel, config.num_layers)
        self.placement = placement or placement_of(self.plan)
        self.mail = PointToPoint(mesh)
        self._schedules: dict[int, Schedule] = {}
        last = self.plan.ranks * self.plan.chunks - 1
        self.chunks = nn.ModuleList(
            build_stage(
                config,
                mesh,
                spec,
                pre_process=stage == 0,
                post_process=stage == last,
                layer_numbers=self.plan.layers[stage],
                rng=rng,
            )
            for stage in self.placement[mesh.pp.rank]
        )
        if self.chunks[0].ties_ends:
            self._tie(last)

    def _tie(self, last: int) -> None:
        """Share the tied weights if both ends are on this rank; refuse copies on ranks outside of `mesh.embd`."""
        first_rank, last_rank = (next(r for r, row in enumerate(self.placement) if s in row) for s in (0, last))
        if first_rank == last_rank == self.mesh.pp.rank:
            stages = dict(self.stages())
            copies = stages[last].tied_weights()
            for name, (module, attribute) in stages[0].tied_weights().items():
                weight = getattr(module, attribute)
                weight.param_layout = dataclasses.replace(layout_of(weight), copies="")
                copy, of_copy = copies[name]
                setattr(copy, of_copy, weight)
        elif first_rank != last_rank and {first_rank, last_rank} != {0, self.mesh.pp.size - 1}:
            raise ConfigError(
                f"an embedding that the first stage, on pipeline rank {first_rank}, and the last, on {last_rank}, "
                "both hold: it is tied, or mtp_num_layers needs it",
                fix="put them on the first and the last rank, or on one; or untie_embeddings_and_output_weights=True "
                "and no mtp_num_layers",
            )

    def stages(self) -> Iterator[tuple[int, Any]]:
        """(global number, stage) of every stage of this rank, each a `contract.ModelStage`."""
        return zip(self.placement[self.mesh.pp.rank], self.chunks, strict=True)

    def schedule(self, num_microbatches: int) -> Schedule:
        """The configured schedule of a step with this many microbatches, checked and cached.

        Raises:
            ConfigError: the schedule does not allow this number of microbatches.
        """
        if num_microbatches not in self._schedules:
            schedule = schedule_of(self.plan, self.mesh.parallel, num_microbatches)
            self._schedules[num_microbatches] = require_runnable(schedule)
        return self._schedules[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Schedule:
        """A schedule of forwards alone."""
        return forward_only(self.plan.ranks, num_microbatches, self.placement)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refused: stages of a pipeline are run by its executor."""
        raise ConfigError(
            "a pipeline rank holds a part of the model, which cannot be called by itself",
            fix="training.step.train_step, or get_forward_backward_func(model) of the same file",
        )


def schedule_of(plan: StagePlan, parallel: ParallelConfig, num_microbatches: int) -> Schedule:
    """The configured schedule.

    Raises:
        ConfigError: the schedule does not allow these sizes.
    """
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    return _built(plan.schedule, plan.ranks, num_microbatches, plan.chunks, group)


@functools.lru_cache(maxsize=8)  # a plan asks for the list of each rank
def _built(name: str, p: int, m: int, v: int, group: int | None) -> Schedule:
    options = {} if group is None else {"microbatch_group_size_per_vp_stage": group}
    return build_schedule(name, p, m, v, **options)


def placement_of(plan: StagePlan) -> Placement:
    """The placement of the plan's schedule."""
    return SCHEDULES[plan.schedule].place(plan.ranks, plan.chunks)


def build_chunks(
    config: TransformerConfig, mesh: Mesh, spec: ModuleSpec | None = None, rng: RngStreams | None = None
) -> Any:
    """The model of a rank without initial values: one stage, or the `ModelChunks` of a pipeline."""
    return build_stage(config, mesh, spec, rng=rng) if mesh.pp.size == 1 else ModelChunks(config, mesh, spec, rng)


def build_model_chunks(
    config: TransformerConfig, mesh: Mesh, seed: int, spec: ModuleSpec | None = None, rng: RngStreams | None = None
) -> Any:
    """The model of a rank, on its device, initialised from `seed`: all of it, or the `ModelChunks` of a pipeline."""
    with torch.device("meta"):
        model = build_chunks(config, mesh, spec, rng)
    initialize(model, seed, mesh.device)
    return model


@functools.lru_cache(maxsize=64)
def count_parameters(config: TransformerConfig, active: bool = False) -> int:
    """Trainable parameters of the logical model, without the padding of the vocabulary.

    Args:
        config: the model.
        active: of the experts count only the k that a token passes.
    """
    with torch.device("meta"):
        model = build_stage(config.replace(transformer_impl="local", lora_base=None), Mesh.serial())
    count = 0
    for _, param in logical_parameters(model):
        layout = layout_of(param)
        if param.requires_grad:
            size = math.prod((layout.rows or layout.shape[0], *layout.shape[1:]))
            of_a_token = active and layout.experts is not None
            count += size // layout.shape[0] * config.moe_router_topk if of_a_token else size
    return count
