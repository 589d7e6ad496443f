"""The layouts of a search: what a layout is, its flags, and all layouts whose sizes divide what they must.

A field that the user has set by a flag is not searched: `--tensor-model-parallel-size 8` keeps tp at 8. A layout whose
sizes divide may still break a rule of the package; `check_run` finds that when the layout is planned.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.errors import require
from minimegatron.footprint.kinds import one_of_each
from minimegatron.layers.param import layout_of
from minimegatron.models.spec import ModuleSpec
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.planning import RECOMPUTE, ZERO, changed
from minimegatron.training.memory_report import spec_of

FIELDS = {  # of a layout -> the field that a flag would set
    "tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size",
    "v": "num_virtual_stages_per_pipeline_rank", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size", "schedule": "pipeline_schedule", "micro_batch": "micro_batch_size",
    "recompute": "recompute_granularity", "zero": "data_parallel_sharding_strategy",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """One layout of the search; `v` chunks a rank, `zero` the ZeRO stage, `recompute` a key of `RECOMPUTE`.

    With `ends` the embedding and the loss count as a layer each where the pipeline is cut.
    """

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    v: int
    schedule: str
    micro_batch: int
    recompute: str
    zero: int
    ends: bool = False

    @property
    def pipeline(self) -> dict[str, Any]:
        """The fields of `ParallelConfig` that cut the model into stages."""
        if self.pp == 1:
            return {}
        found: dict[str, Any] = {"pipeline_schedule": self.schedule}
        if self.schedule == "interleaved":
            found["num_virtual_stages_per_pipeline_rank"] = self.v
        return found | {f"account_for_{end}_in_pipeline_split": self.ends for end in ("embedding", "loss")}

    def words(self) -> str:
        """The layout in words: sizes above 1, schedule, micro-batch, recompute and ZeRO stage."""
        sizes = "".join(f"{name} {n}, " for name in ("tp", "cp", "pp", "v", "ep") if (n := getattr(self, name)) > 1)
        sizes += f"{self.schedule}, " * (self.pp > 1)
        return f"{sizes}micro-batch {self.micro_batch}, recompute {self.recompute}, ZeRO-{self.zero}"

    def run(self, base: RunConfig) -> RunConfig:
        """The base run with this layout.

        Raises:
            ConfigError: the layout breaks a rule of one configuration, or `recompute` or `zero` has no such value.
        """
        require(
            self.recompute in RECOMPUTE, f"recompute {self.recompute!r} in a layout", f"one of {', '.join(RECOMPUTE)}"
        )
        require(self.zero in range(len(ZERO)), f"zero {self.zero!r} in a layout", "a stage, 0 to 3")
        kept = base.parallel.overlap_param_gather and self.zero in (1, 2)
        return changed(
            base,
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.tp > 1,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            micro_batch_size=self.micro_batch,
            data_parallel_sharding_strategy=ZERO[self.zero],
            overlap_param_gather=kept,
            **self.pipeline,
            **({} if "recompute_granularity" in base.given else RECOMPUTE[self.recompute]),
        )

    def flags(self, base: RunConfig) -> list[str]:
        """The flags of `minimegatron train` that differ from those of the base run."""
        run, words = self.run(base), list[str]()
        for section in ("parallel", "training", "model"):
            mine, theirs = getattr(run, section), getattr(base, section)
            for field in dataclasses.fields(mine):
                value = getattr(mine, field.name)
                if value != getattr(theirs, field.name) and value is not False and value is not None:
                    several = value if isinstance(value, tuple) else (value,)
                    words += [f"--{field.name.replace('_', '-')}", *map(str, several if value is not True else ())]
        return words


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def experts_of(config: TransformerConfig, spec: ModuleSpec | None) -> int:
    """The largest number of experts in a layer; 1 for a model without experts."""
    places = (layout_of(param) for param in one_of_each(config, Mesh.serial(), spec).parameters())
    return max((place.shape[0] for place in places if place.experts is not None), default=1)


def layouts(base: RunConfig, world: int, cluster: Cluster) -> Iterator[Layout]:
    """All layouts whose sizes divide heads, layers, experts, batch and GPUs."""
    model, batch = base.model, base.training.global_batch_size
    require(batch is not None, "a search without --global-batch-size: it decides what every layout computes", "give it")
    assert batch is not None
    tps = [n for n in powers(cluster.gpus_per_node) if not model.num_attention_heads % n]
    cps = [n for n in powers(max(1, min(64, base.data.seq_length // 4096)))]
    pps = [n for n in range(1, 65) if not model.num_layers % n or not (model.num_layers + 2) % n]
    experts = experts_of(model, spec_of(base))
    eps = [n for n in divisors(experts) if n <= 64]
    wide = {
        name: getattr(base.model if name == "recompute" else base.parallel, field, None)
        for name, field in FIELDS.items()
    }
    wide["micro_batch"] = base.training.micro_batch_size
    fixed = {name: value for name, value in wide.items() if FIELDS[name] in base.given}

    def choose(name: str, values: Iterable) -> list:
        return [fixed[name]] if name in fixed else list(values)

    most = 1 if base.optimizer.has_matrices else 4  # Muon wants whole matrices
    zeros = [ZERO.index(fixed["zero"])] if "zero" in fixed else range(base.parallel.use_distributed_optimizer, most)
    again = [fixed["recompute"] or "none"] if "recompute" in fixed else list(RECOMPUTE)
    for tp, cp, pp, ep in itertools.product(choose("tp", tps), choose("cp", cps), choose("pp", pps), choose("ep", eps)):
        dp, rest = divmod(world, tp * cp * pp)
        if rest or batch % dp:
            continue
        for etp in choose("etp", {1, tp} if experts > 1 else {tp}):
            if world % (etp * ep * pp):
                continue
            for b in choose("micro_batch", (n for n in powers(8) if not batch // dp % n)):
                if batch // dp % b == 0:
                    for schedule, v, ends in _pipelines(model.num_layers, pp, batch // dp // b, fixed):
                        for recompute, zero in itertools.product(again, zeros):
                            yield Layout(tp, cp, pp, ep, etp, v, schedule, b, recompute, zero, ends)


def _pipelines(layers: int, pp: int, m: int, fixed: dict) -> Iterator[tuple[str, int, bool]]:
    """(Schedule, chunks a rank, whether the ends count as layers) for pp ranks and m microbatches."""
    if pp == 1:
        yield "1f1b", 1, False
        return
    for ends in (False, True):
        each, rest = divmod(layers + 2 * ends, pp)
        found = [("1f1b", 1), ("zb_h1", 1)] + [("zb_v", 2)] * (each % 2 == 0 and m >= 2 * pp)
        found += [("interleaved", v) for v in divisors(each)[1:] if m % pp == 0]
        for name, v in found if not rest else ():
            if fixed.get("schedule", name) == name and fixed.get("v", v) in (v, None):
                yield name, v, ends
