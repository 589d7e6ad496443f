"""The part of a model that one pipeline rank holds: one or several stages of it.

A rank of a pipeline with p ranks and v chunks holds v stages. `StagePlan` (`config/stages`) says which layers a
stage has, the placement of the schedule which stages a rank has:

    L = 8, p = 2, v = 2, round robin            V-shaped
    rank 0   E 0 1        4 5                   E 0 1        6 7 L
    rank 1        2 3         6 7 L                  2 3 4 5

Layers keep their global numbers, so a parameter has the same name in every layout.

What both ends of a model use, such as a tied embedding, is one tensor or two copies: `models/tied`.

Megatron-LM: `get_model` in `megatron/training/training.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.comm.random import RngStreams
from minimegatron.config.model import TransformerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.errors import ConfigError
from minimegatron.layers.logical import initialize
from minimegatron.models.decoder import GPTModel
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.tied import tie_embeddings
from minimegatron.parallel.pipeline.actions import Placement
from minimegatron.parallel.pipeline.schedule_sim import require_runnable
from minimegatron.parallel.pipeline.schedules import SCHEDULES, Schedule, build_schedule, forward_only


class ModelChunks(nn.Module):
    """The stages of one pipeline rank, in the order of their chunks.

    Args:
        config: the model.
        mesh: its layout.
        spec: of each layer.
        rng: dropout streams.
        placement: where the stages are; default that of the configured schedule.

    Attributes:
        chunks: the stages.
        plan, placement: how the model is cut, and who holds what.
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
            GPTModel(
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
        if GPTModel.ties_ends(config):
            self._tie(last)

    def _tie(self, last: int) -> None:
        """Share what both ends use where both are here; refuse copies that `mesh.embd` leaves out."""
        first_rank, last_rank = (next(r for r, row in enumerate(self.placement) if s in row) for s in (0, last))
        if first_rank == last_rank == self.mesh.pp.rank:
            here = dict(self.stages())
            tie_embeddings(here[0], here[last])
        elif first_rank != last_rank and {first_rank, last_rank} != {0, self.mesh.pp.size - 1}:
            raise ConfigError(
                f"an embedding that the first stage, on pipeline rank {first_rank}, and the last, on {last_rank}, "
                "both hold: it is tied, or mtp_num_layers needs it",
                fix="put them on the first and the last rank, or on one; or untie_embeddings_and_output_weights=True "
                "and no mtp_num_layers",
            )

    def stages(self) -> Iterator[tuple[int, Any]]:
        """(global number, stage) of every stage that is here, each a `contract.ModelStage`."""
        return zip(self.placement[self.mesh.pp.rank], self.chunks, strict=True)

    def schedule(self, num_microbatches: int) -> Schedule:
        """The configured schedule of a step with so many microbatches, checked; made once.

        Raises:
            ConfigError: the schedule cannot have so many.
        """
        if num_microbatches not in self._schedules:
            schedule = schedule_of(self.plan, self.mesh.parallel, num_microbatches)
            self._schedules[num_microbatches] = require_runnable(schedule)
        return self._schedules[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Schedule:
        """Forwards alone."""
        return forward_only(self.plan.ranks, num_microbatches, self.placement)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Only stages of a pipeline can be run, by its executor."""
        raise ConfigError(
            "a pipeline rank holds a part of the model, which cannot be called by itself",
            fix="train_step(..., StepOptions(forward_backward_fn=training.pipelined.get_forward_backward_fn(model)))",
        )


def schedule_of(plan: StagePlan, parallel: ParallelConfig, num_microbatches: int) -> Schedule:
    """The configured schedule.

    Raises:
        ConfigError: it cannot have these sizes.
    """
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    options = {} if group is None else {"microbatch_group_size_per_vp_stage": group}
    return build_schedule(plan.schedule, plan.ranks, num_microbatches, plan.chunks, **options)


def placement_of(plan: StagePlan) -> Placement:
    """Where the plan's schedule puts the stages."""
    return SCHEDULES[plan.schedule].place(plan.ranks, plan.chunks)


def build_model_chunks(
    config: TransformerConfig, mesh: Mesh, seed: int, spec: ModuleSpec | None = None, rng: RngStreams | None = None
) -> GPTModel | ModelChunks:
    """What this rank holds of the model, on its device, initialised from `seed`: all of it, or stages of a pipeline."""
    with torch.device("meta"):
        model = GPTModel(config, mesh, spec, rng=rng) if mesh.pp.size == 1 else ModelChunks(config, mesh, spec, rng)
    initialize(model, seed, mesh.device)
    return model
