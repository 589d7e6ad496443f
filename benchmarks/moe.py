"""What experts cost beyond their arithmetic: bytes of the dispatch, and tokens that may not be dropped.

    OMP_NUM_THREADS=1 python -m benchmarks.moe            all, a minute or two
    OMP_NUM_THREADS=1 python -m benchmarks.moe --smoke    the same code on tiny sizes, seconds

**Bytes.** Payload of every message of a layer's forward pass, as the trace counts it, beside the closed form,
`layers.dispatch.dispatch_bytes`, for both dispatchers and the ways to share 8 experts over 2 or 4 ranks. They must be
equal, not near.

**Dropless.** A capacity bounds every message and product; without one a layer must cope with any load. The load here
is even: token t likes experts t .. t + k - 1 (mod E), so a capacity of factor 1 drops nothing and both contenders
compute the same numbers. Cost: CPU-seconds of forward and backward of one layer, all ranks added
(`labkit/paired.py`). Reported: dropless over dropping, to be at most 1.10.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from typing import Any

import torch

from labkit.paired import paired
from labkit.ranks.pool import WarmPool
from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.layers.logical import initialize
from minimegatron.layers.moe.dispatch import dispatch_bytes
from minimegatron.layers.moe.layer import MoELayer

EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[int, tuple[dict[str, int], ...]] = {2: ({EP: 2}, {ETP: 2}), 4: ({EP: 4}, {EP: 2, ETP: 2}, {EP: 2})}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One layer: h, f of an expert, E, k; tokens of a rank; repetitions that are timed in one run."""

    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int
    repeats: int

    def config(self, **fields: Any) -> TransformerConfig:
        sizes: dict[str, Any] = {
            "num_layers": 1,
            "hidden_size": self.hidden,
            "num_attention_heads": 1,
            "num_experts": self.experts,
            "moe_router_topk": self.topk,
            "moe_ffn_hidden_size": self.ffn,
            "activation": "swiglu",
            "add_bias_linear": False,
        }
        return TransformerConfig(**{**sizes, **fields})


FULL = Workload(hidden=256, ffn=512, experts=8, topk=2, tokens=1024, repeats=4)
SMOKE = Workload(hidden=16, ffn=24, experts=8, topk=2, tokens=32, repeats=1)
CONTENDERS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "dropping": {"moe_expert_capacity_factor": 1.0},
}


def evenly_loaded(work: Workload, mesh: Mesh, **fields: Any) -> tuple[MoELayer, torch.Tensor]:
    """A layer, and tokens [T, 1, h] of which every expert gets T k / E."""
    layer = MoELayer(work.config(**fields), mesh)
    initialize(layer, 0)
    x = 0.1 * torch.randn(work.tokens, 1, work.hidden, generator=torch.Generator().manual_seed(mesh.rank))
    likes = (torch.arange(work.tokens)[:, None] + torch.arange(work.topk)) % work.experts
    with torch.no_grad():
        layer.router.weight.zero_()[:, : work.experts] += 5 * torch.eye(work.experts)
        x[torch.arange(work.tokens)[:, None], 0, likes] += 2.0 + 0.1 * torch.arange(work.topk)
    return layer, x


def counted(rank: int, world: int, work: Workload, layout: dict[str, int], dispatcher: str) -> dict[str, int]:
    """{"collective/axis": bytes} of this rank's forward pass."""
    mesh = Mesh.build(ParallelConfig(**layout))  # type: ignore[arg-type]
    layer, x = evenly_loaded(work, mesh, moe_token_dispatcher_type=dispatcher)
    with torch.no_grad(), trace.record(rank) as log:
        layer(x)
    found: dict[str, int] = {}
    for event in log.select(kind="comm"):
        key = f"{event.name}/{event.axis}"
        found[key] = found.get(key, 0) + event.nbytes
    return found


def compare_bytes(work: Workload) -> list[str]:
    """A line for each layout and dispatcher; "WRONG" in those that do not move what the formula says."""
    lines = []
    for world, layouts in LAYOUTS.items():
        with WarmPool(world) as pool:
            for layout in layouts:
                for dispatcher in ("allgather", "alltoall"):
                    config = work.config(moe_token_dispatcher_type=dispatcher)
                    want = dispatch_bytes(config, work.tokens, layout.get(EP, 1), layout.get(ETP, 1))
                    found = pool.run(counted, work, layout, dispatcher, timeout=120)
                    right = all(one == want for one in found)
                    verdict = "as the formula says" if right else f"WRONG: {found} not {want}"
                    name = " ".join(f"{axis}{layout[key]}" for axis, key in (("ep", EP), ("etp", ETP)) if key in layout)
                    lines.append(f"{world} ranks  {name:9} {dispatcher:9} {sum(want.values()):>12,} bytes  {verdict}")
    return lines


def seconds_of(rank: int, world: int, work: Workload, layout: dict[str, int], contender: str, dispatcher: str) -> float:
    """CPU-seconds of this rank."""
    mesh = Mesh.build(ParallelConfig(**layout))  # type: ignore[arg-type]
    layer, x = evenly_loaded(work, mesh, moe_token_dispatcher_type=dispatcher, **CONTENDERS[contender])
    x.requires_grad_()

    def once() -> None:
        layer(x).square().sum().backward()

    once()  # allocations
    assert not layer.router.tally[work.experts], "the load is even: nothing is dropped"
    begun = time.process_time()
    for _ in range(work.repeats):
        once()
    return time.process_time() - begun


def compare_dropping(work: Workload, pairs: int, warmups: int) -> list[str]:
    """A line for one process and one for two ranks of ep."""
    lines = []
    for world, layout in ((1, {}), (2, {EP: 2})):
        with WarmPool(world) as pool:

            def cost(contender: str, pool: Any = pool, layout: dict[str, int] = layout) -> float:
                return float(sum(pool.run(seconds_of, work, layout, contender, "alltoall", timeout=120)))

            ratio = paired(lambda: cost("dropping"), lambda: cost("dropless"), pairs, warmups)
        lines.append(f"{'one process' if world == 1 else 'ep2'}: dropless over dropping, CPU-seconds: {ratio}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    work, pairs, warmups = (SMOKE, 2, 0) if args.smoke else (FULL, args.pairs, 1)
    print(
        f"torch {torch.__version__}, {platform.machine()}, 1 thread a rank; h {work.hidden}, f {work.ffn}, "
        f"{work.topk} of {work.experts} experts, {work.tokens} tokens a rank, fp32"
    )
    for line in compare_bytes(work):
        print(line, flush=True)
    for line in compare_dropping(work, pairs, warmups):
        print(line, flush=True)


if __name__ == "__main__":
    from benchmarks import moe  # ranks find functions and workloads by the name of their module

    moe.main()
