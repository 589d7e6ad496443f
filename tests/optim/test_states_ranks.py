"""Low-precision states and offload in every layout: what is element by element does not ask how parameters are cut.

In one layout, with one batch after the other, several optimizers train the same model. Where all dtypes are fp32, and
where states are on the host, weights and norms are those of plain AdamW bit for bit; where moments have fewer bits,
norms begin alike and weights stay near.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.logical import gather_logical, load_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.parallel.data.grad_buffer import TemporaryGradBuffer
from tests.parallel.data.test_zero import DENSE, EXPERTS, STAGES, batch_of, layout_of_sizes
from tests.thorough import mostly_thorough
from tests.twin import Case, accumulate, distance, parallel_model, weights

STEPS = 3
PLAIN = OptimizerConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.1, adam_eps=1e-6)
AWARE = dataclasses.replace(PLAIN, use_precision_aware_optimizer=True, store_param_remainders=False)
OFFLOAD = dataclasses.replace(PLAIN, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
EXACT = {
    "fp32 states": AWARE,
    **{f"{f} on the host": dataclasses.replace(OFFLOAD, optimizer_offload_fraction=f) for f in (0.0, 0.5, 1.0)},
}
NEAR = {
    "16 bits": dataclasses.replace(AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16", store_param_remainders=True),
    "8 bits": dataclasses.replace(AWARE, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"),
}

Run = tuple[dict[str, torch.Tensor], list[float], dict[str, int]]


def trained(case: Case, mesh: Mesh, config: OptimizerConfig) -> Run:
    """Logical weights after the steps, norms, and bytes by owner."""
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    norms = []
    for step in range(STEPS):
        accumulate(ddp, batch_of(case, step), mesh)
        norms.append(optimizer.step().grad_norm or 0.0)
    held = {owner: sum(t.nbytes for t in tensors) for owner, tensors in optimizer.held().items()}
    with ddp.whole_weights():
        return {n: gather_logical(p, layout_of(p), mesh) for n, p in logical_parameters(ddp)}, norms, held


def compared(rank: int, world: int, case: Case) -> dict[str, Any]:
    """What differs from plain AdamW, in the layout of the case."""
    mesh = Mesh.build(case.parallel)
    want, norms, held = trained(case, mesh, PLAIN)
    found: dict[str, Any] = {"held": held}
    for name, config in (EXACT | NEAR).items():
        got, its, bytes_held = trained(case, mesh, config)
        differ = [n for n in want if not torch.equal(got[n], want[n])]
        off = max(distance(got[n].float(), want[n].float()) for n in want)
        found[name] = (len(differ), its == norms, its[0] == norms[0], off, bytes_held)
    return found


LAYOUTS = [
    (stage, model, dtype, dp, tp, pp, ep)
    for stage in STAGES
    for model, dtype, dp, tp, pp, ep in (
        ("dense", "fp32", 2, 1, 1, 1),
        ("dense", "bf16", 2, 1, 1, 1),
        ("dense", "fp32", 2, 2, 1, 1),
        ("dense", "bf16", 2, 1, 2, 1),
        ("experts", "bf16", 2, 1, 1, 2),
        ("experts", "fp32", 2, 2, 1, 2),
    )
]


@pytest.mark.parametrize(
    "stage, model, dtype, dp, tp, pp, ep",
    mostly_thorough(LAYOUTS, [("optim", "experts", "bf16", 2, 1, 1, 2)].__contains__),
)
def test_a_layout_does_not_matter(
    ranks: Any, stage: str, model: str, dtype: str, dp: int, tp: int, pp: int, ep: int
) -> None:
    fields = {**(DENSE if model == "dense" else EXPERTS), "params_dtype": dtype}
    case = Case(layout_of_sizes(tp, pp, ep), fields, sharding=stage)
    half = dtype == "bf16" and stage != "fsdp2"
    for report in ranks(dp * tp * pp).run(compared, case, timeout=600):
        elements = report["held"]["moments"] // 8
        for name in EXACT:
            differ, same_norms, _, _, held = report[name]
            assert (differ, same_norms) == (0, True), name
            places = [held.get(f"moments{place}", 0) for place in ("", " (host)")]
            assert sum(places) == 8 * elements
            assert [place > 0 for place in places] == {"0.5": [True, True], "1.0": [False, True]}.get(
                name[:3], [True, False]
            )
        for name, bytes_of_one in (("16 bits", (2, 4)), ("8 bits", (4, 2))):
            differ, _, same_first, off, held = report[name]
            assert same_first and differ > 0 and off < 0.05, (name, off)
            assert held["moments"] == bytes_of_one[1] * elements
            assert held["main parameters"] == bytes_of_one[0] * elements * half


# ---------------------------------------------------------------------------------------- gradients in bf16


def gradients(rank: int, world: int, case: Case, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """Of a batch, whole; and the bytes of their buffers."""
    mesh = Mesh.build(case.parallel)
    model = GPTModel(case.config, mesh)
    load_logical(model, weights(case.config, case.seed))
    ddp = data_parallel(model, mesh, dtype)
    accumulate(ddp, case, mesh)
    return ddp.whole_gradients(), sum(t.nbytes for t in ddp.held()["gradients"])


@pytest.mark.parametrize("stage", mostly_thorough(STAGES[:-1], [3]))
def test_gradients_in_bf16_take_half_the_bytes_and_are_near(ranks: Any, stage: str) -> None:
    """Each of two microbatches, two ranks and the division round by 2^-8 of what is there."""
    case = Case({}, {**DENSE, "params_dtype": "bf16"}, sharding=stage, accumulation=2)
    exact, rounded = (ranks(2).run(gradients, case, dtype) for dtype in (torch.float32, torch.bfloat16))
    for (want, more), (got, fewer) in zip(exact, rounded, strict=True):
        assert 2 * fewer == more
        off = [distance(got[n].float(), g) for n, g in want.items() if g.any()]
        assert 0 < max(off) < 4 * 2.0**-8 and all(g.dtype == torch.bfloat16 for g in got.values())


def test_the_number_of_tokens_is_not_rounded() -> None:
    """1003 is 1004 in bf16."""
    values = torch.arange(1, 4000, dtype=torch.float32).bfloat16()
    buffer = object.__new__(TemporaryGradBuffer)
    buffer.data = values.clone()
    buffer.divide(torch.tensor(1003.0, dtype=torch.float64))
    assert torch.equal(buffer.data, (values.double() / 1003).bfloat16())
    assert not torch.equal(buffer.data, values / torch.tensor(1003.0).bfloat16())
