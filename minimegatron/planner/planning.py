"""The plan of a run on a cluster: the memory and messages of each rank, the time of a step, and whether it fits.

    run = parse_args(["--preset", "llama3-70b", ...], world_size=256, reads=False)
    told = plan(run, 256, CLUSTERS["h100"])
    told.fits, told.time.seconds, told.time.mfu, told.days(1e12)

`footprint` predicts memory, `traffic` messages, `timing` time; all three read the configuration of the run itself.
`unknown` names what cannot be predicted; no number contains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from minimegatron.comm.mesh import rank_groups
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError
from minimegatron.footprint.events import Unpredicted
from minimegatron.footprint.prediction import Prediction
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.timing import StepTime, step_time
from minimegatron.planner.traffic import Traffic, run_messages
from minimegatron.training.memory_report import predict_run
from minimegatron.training.rules import check_run

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "full": {"recompute_granularity": "full"},
}
HOST = "(host)"  # ends the name of what --optimizer-cpu-offload keeps in the host's memory
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TERMS = {  # owner of bytes -> what divides them
    "parameters": "tp, pp, ep and ZeRO-3",
    "gradients": "tp, pp, ep and ZeRO-2",
    "main parameters": "tp, pp, ep and ZeRO-1",
    "moments": "tp, pp, ep and ZeRO-1",
    "activations": "tp with sequence parallelism, cp, the micro-batch and recompute, but not pp,",
    "workspace": "tp, cp, the micro-batch",
    "communication": "buckets",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a run before it runs.

    Attributes:
        run, world, cluster: the run, its number of GPUs, and which.
        memory: {rank: its bytes} for the first rank of each pipeline stage.
        time: the time of a step; None where the time of an operation is not known.
        unknown: what could not be predicted.
    """

    run: RunConfig
    world: int
    cluster: Cluster
    memory: dict[int, Prediction]
    time: StepTime | None
    unknown: tuple[str, ...] = ()

    @property
    def fullest(self) -> int:
        """The rank with the most bytes."""
        return max(self.memory, key=lambda rank: on_device(self.memory[rank]))

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return on_device(self.memory[self.fullest])

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory; False where memory is not predicted."""
        return not any(told.unknown for told in self.memory.values()) and self.bytes <= self.cluster.usable

    @property
    def blame(self) -> str:
        """The owner of most bytes on the fullest rank."""
        peak = without_host(self.memory[self.fullest].peak)
        return max(peak, key=lambda owner: peak[owner])

    def tokens_a_step(self) -> int:
        """Tokens of all ranks in a step."""
        batch = self.run.training.global_batch_size
        dp = self.run.parallel.data_parallel_size(self.world)
        return (batch or self.run.training.micro_batch_size * dp) * self.run.data.seq_length

    def days(self, tokens: float) -> float:
        """Days of training on that many tokens, without interruptions."""
        assert self.time is not None, "there is a time"
        return tokens / self.tokens_a_step() * self.time.seconds / 86_400

    def cost(self, tokens: float) -> float:
        """Cost of training on that many tokens, at the cluster's price."""
        return self.days(tokens) * 24 * self.world * self.cluster.price

    def messages(self) -> Traffic:
        """Messages of the fullest rank in a step."""
        return run_messages(self.run, self.fullest, self.world)


def without_host(owners: Mapping[str, int]) -> dict[str, int]:
    """The owners whose memory is on the GPU."""
    return {owner: n for owner, n in owners.items() if HOST not in owner}


def on_device(told: Prediction) -> int:
    """Bytes at the fullest moment, without those in the host's memory."""
    return sum(without_host(told.peak).values())


def plan(run: RunConfig, world: int, cluster: Cluster) -> Plan:
    """Plan a run.

    Raises:
        ConfigError: the run breaks a rule of the package.
    """
    check_run(run, world, reads=False)
    ranks = rank_groups(run.parallel, world, "pp")[0]
    memory = {rank: predict_run(run, rank, world, cluster.device) for rank in ranks}
    unknown = dict.fromkeys(what for told in memory.values() for what in told.unknown)
    try:
        time = step_time(run, world, cluster)
    except Unpredicted as what:
        return Plan(run, world, cluster, memory, None, tuple(dict.fromkeys((*unknown, str(what)))))
    return Plan(run, world, cluster, memory, time, tuple(unknown))


def changed(run: RunConfig, **fields: Any) -> RunConfig:
    """The run with other fields of its model, layout, optimizer or training; fields derived from the layout are derived
    again.

    Raises:
        ConfigError: the fields do not fit together.
    """
    sections: dict[str, Any] = {}
    for name in ("model", "parallel", "optimizer", "training"):
        config = getattr(run, name)
        mine = {key: value for key, value in fields.items() if hasattr(config, key)}
        if name == "parallel" and config.expert_tensor_parallel_size == config.tensor_model_parallel_size:
            mine = {"expert_tensor_parallel_size": mine.get("tensor_model_parallel_size"), **mine} if mine else {}
            mine = {key: value for key, value in mine.items() if key != "expert_tensor_parallel_size" or value}
        sections[name] = config.replace(**mine) if mine else config
    return dataclasses.replace(run, **sections)


@dataclasses.dataclass(frozen=True)
class Change:
    """One change that makes a run fit: its flags, and the plan with it."""

    flags: str
    plan: Plan


def neighbours(run: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Flags, fields) of every single change that saves memory."""
    parallel, training = run.parallel, run.training
    if run.model.recompute_granularity != "full":
        yield "--recompute-granularity full", RECOMPUTE["full"]
        if run.model.recompute_granularity is None:
            mlp = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
            yield "--recompute-granularity selective --recompute-modules mlp", mlp
    for stage in range(ZERO.index(parallel.data_parallel_sharding_strategy) + 1, 4):
        flags = f"--data-parallel-sharding-strategy {ZERO[stage]}"
        late = {"overlap_param_gather": parallel.overlap_param_gather and stage < 3}
        yield flags, {"data_parallel_sharding_strategy": ZERO[stage], **late}
    if training.micro_batch_size > 1:
        half = training.micro_batch_size // 2
        yield f"--micro-batch-size {half}", {"micro_batch_size": half}
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"):
        field = f"{axis}_parallel_size"
        for factor in (2, 4):
            size = factor * getattr(parallel, field)
            flags = f"--{field.replace('_', '-')} {size}"
            if axis == "tensor_model":
                yield f"{flags} --sequence-parallel", {field: size, "sequence_parallel": True}
            else:
                yield flags, {field: size}
    if not run.optimizer.use_precision_aware_optimizer and run.optimizer.optimizer == "adam":
        moments = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        yield flags, moments


def cheapest_changes(told: Plan, number: int = 3) -> list[Change]:
    """The single changes that make a run fit, the fastest first; pairs of them where no single one does."""
    batch = told.tokens_a_step() // told.run.data.seq_length
    base = changed(told.run, global_batch_size=batch)
    single = [(flags, fields) for flags, fields in neighbours(base)]
    found = _fitting(told, base, single)
    if not found:
        both = ((one, other) for i, one in enumerate(single) for other in single[:i])
        pairs = [(f"{a} {b}", {**x, **y}) for (a, x), (b, y) in both if not x.keys() & y.keys()]
        found = _fitting(told, base, pairs)
    return sorted(found, key=lambda change: change.plan.time.seconds if change.plan.time else float("inf"))[:number]


def _fitting(told: Plan, base: RunConfig, tried: list[tuple[str, dict[str, Any]]]) -> list[Change]:
    found = []
    for flags, fields in tried:
        try:
            run = changed(base, **fields)
            check_run(run, told.world, reads=False)
        except ConfigError:
            continue
        ends = rank_groups(run.parallel, told.world, "pp")[0]
        both = (predict_run(run, rank, told.world, told.cluster.device) for rank in {ends[0], ends[-1]})
        if all(on_device(one) <= told.cluster.usable for one in both):
            other = plan(run, told.world, told.cluster)
            found += [Change(flags, other)] * other.fits
    return found
