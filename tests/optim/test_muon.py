"""Muon: torch's own as the witness, singular values by an SVD, and one process as that of every layout."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.config.optimizer import COEFFICIENTS, coefficients_of
from minimegatron.errors import ConfigError
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import ParamLayout, layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.muon import Orthogonalizer, newton_schulz, scale_of
from minimegatron.parallel.data.data_parallel import Shard
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.axes import EP, ETP, PP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case, accumulate, distance, parallel_model

STEPS = 3
MUON = OptimizerConfig(
    optimizer="muon",
    lr=1e-2,
    weight_decay=0.1,
    clip_grad=0.5,
    muon_fp32_matmul_prec="high",
    muon_extra_scale_factor=0.2,
)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6), (3, 4, 7)])
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_go_through_the_polynomials(shape: tuple[int, ...], kind: str) -> None:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounds = coefficients_of(kind, 10)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in rounds:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(newton_schulz(x, rounds, torch.float64), u * s[..., None, :] @ vh, rtol=0, atol=1e-12)
    assert ((s - 1).abs() < 0.35).all()
    if kind == "quintic":
        assert distance(newton_schulz(x.float(), rounds, torch.bfloat16).double(), u * s[..., None, :] @ vh) < 0.1


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("mode", "theirs"), [("shape_scaling", "original"), ("spectral", "match_rms_adamw")])
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, nesterov: bool, mode: str, theirs: str) -> None:
    """torch's Muon casts to bf16; here it does not, so that both compute in fp64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    in_double = types.SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64})  # 2.15 has `to(torch.bfloat16)`
    monkeypatch.setattr(_muon, "torch", in_double)
    config = dataclasses.replace(
        MUON,
        clip_grad=0.0,
        muon_coefficient_type="simple",
        muon_use_nesterov=nesterov,
        muon_scale_mode=mode,
        muon_extra_scale_factor=0.2 if mode == "spectral" else 1.0,
    )
    net = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)).double()
    twin = [p.detach().clone() for p in net.parameters()]
    optimizer = build_optimizer(config, net, Mesh.serial())
    muon = torch.optim.Muon(twin[::2], config.lr, 0.1, nesterov=nesterov, adjust_lr_fn=theirs)
    adam = torch.optim.AdamW(twin[1::2], config.lr, weight_decay=0.0)
    for step in range(8):
        for p, q in zip(net.parameters(), twin, strict=True):
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        optimizer.step(), muon.step(), adam.step()
    for p, q in zip(net.parameters(), twin, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_which_parameters_are_matrices() -> None:
    model = {"family": "mixtral", "num_experts": 4, "moe_router_topk": 2}
    net = GPTModel(Case(model=model).config, Mesh.serial())
    optimizer = build_optimizer(MUON, net, Mesh.serial())
    state = optimizer.state_dict()["state"]
    matrices = {name.split(".", 3)[-1] for name, tensors in state.items() if "momentum_buffer" in tensors}
    assert matrices == {
        *(f"self_attention.linear_{x}.weight" for x in ("qkv", "proj")),
        *(f"mlp.{x}" for x in ("router.weight", "experts.weight1", "experts.weight2")),
    }
    assert all("exp_avg" in tensors for tensors in state.values() if "momentum_buffer" not in tensors)


def of(layout: ParamLayout, x: torch.Tensor, **fields: Any) -> torch.Tensor:
    return Orthogonalizer("w", layout, Mesh.serial(), dataclasses.replace(MUON, **fields))(x)


def test_fused_projections_and_experts_are_several_matrices() -> None:
    x = torch.randn(2 * (6 + 3 + 3), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = x.unflatten(0, (2, 12)).split([6, 3, 3], 1)
    want = [of(ParamLayout((len(r.flatten(0, 1)), 5)), r.flatten(0, 1)).unflatten(0, (2, -1)) for r in rows]
    fused = ParamLayout((24, 5), fused=(6, 3, 3))
    torch.testing.assert_close(of(fused, x), torch.cat(want, 1).flatten(0, 1), rtol=0, atol=0)
    assert distance(of(fused, x), of(fused, x, muon_split_qkv=False)) > 0.1
    stack = ParamLayout((4, 6, 5), experts=(0, 4))
    experts = x.view(4, 6, 5)
    want = [of(ParamLayout((6, 5)), expert) for expert in experts]
    torch.testing.assert_close(of(stack, experts), torch.stack(want), rtol=0, atol=1e-14)


def test_blockwise_takes_each_part_as_a_matrix_of_its_own() -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = of(ParamLayout((8, 6)), x)
    parts = (((0, 4),), ((4, 8),))
    for rank, part in enumerate(x.split(4)):
        block = of(ParamLayout((8, 6), 0, parts, rank), part, muon_tp_mode="blockwise")
        torch.testing.assert_close(block, of(ParamLayout((4, 6)), part), rtol=0, atol=0)
        assert distance(block, whole[4 * rank : 4 * rank + 4]) > 0.1


def test_scales() -> None:
    assert [scale_of(8, 2, m) for m in ("spectral", "shape_scaling", "unit_rms_norm")] == [math.sqrt(8), 2.0, 2.0]
    assert [scale_of(2, 8, m) for m in ("spectral", "shape_scaling", "unit_rms_norm")] == [math.sqrt(8), 1.0, 0.5]


def trained(
    rank: int, world: int, case: Case, config: OptimizerConfig
) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Logical weights after some steps, the norms of their gradients, and the elements of this rank's moments."""
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout)) if world > 1 else Mesh.serial()
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    norms = []
    for _ in range(STEPS):
        accumulate(ddp, case, mesh)
        norms.append(optimizer.step().grad_norm)
    weights = {n: gather_logical(p, layout_of(p), mesh) for n, p in logical_parameters(ddp)}
    return weights, norms, sum(t.numel() for t in optimizer.held()["moments"])


LAYOUTS: list[dict[str, Any]] = [
    {}, {TP: 2}, {PP: 2}, {EP: 2}, {TP: 2, EP: 2, ETP: 1, "sequence_parallel": True}, {TP: 4},
]  # fmt: skip


@pytest.mark.parametrize("layout", mostly_thorough(LAYOUTS, [0, 4]), ids=str)
def test_every_layout_takes_the_steps_of_one_process(ranks: Any, layout: dict[str, Any]) -> None:
    """The same samples: dp 2 of one microbatch each, or one process of two. Four tp ranks cut through groups of qkv."""
    model: dict[str, Any] = {"num_layers": 2}
    model |= {"family": "mixtral", "num_experts": 4, "moe_router_topk": 2} if EP in layout else {}
    dp = 2 if layout.get(TP, 1) < 4 else 1
    pool = ranks(dp * layout.get(TP, 1) * layout.get(PP, 1))
    twin = pool.run(trained, Case({}, model, accumulation=1, double=True), MUON) if layout == {} else None
    serial = serial_weights(model, dp)
    kinds = [("muon", "duplicated"), ("dist_muon", "duplicated")]
    kinds += [("muon", "distributed")] if layout.get(TP) == 2 else []
    for optimizer, mode in kinds:
        config = dataclasses.replace(MUON, optimizer=optimizer, muon_tp_mode=mode)
        case = Case(layout, {**model}, accumulation=1, double=True)
        results = pool.run(trained, case, config)
        for weights, norms, _ in results:
            assert norms == pytest.approx(serial[1], rel=1e-9)
            for name, weight in weights.items():
                assert distance(weight, serial[0][name]) <= 1e-7, name
        if optimizer == "dist_muon" and dp == 2 and not layout:
            assert twin is not None
            assert sum(r[2] for r in results) == twin[0][2], "every moment has one owner"
            assert max(r[2] for r in results) < 0.7 * twin[0][2]


def serial_weights(model: dict[str, Any], dp: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, on the samples of all replicas, without a wrapper."""
    from minimegatron.layers.logical import load_logical
    from minimegatron.layers.moe.router import set_loss_scale
    from tests.twin import losses, microbatch, weights

    case = Case({}, model, double=True)
    net = GPTModel(case.config, Mesh.serial())
    load_logical(net, weights(case.config, case.seed))
    net = net.double()
    optimizer = build_optimizer(MUON, net, Mesh.serial())
    batches = [microbatch(case, d, 0) for d in range(dp)]
    count = sum(float(b["loss_mask"].sum()) for b in batches)
    norms = []
    for _ in range(STEPS):
        net.zero_grad()
        set_loss_scale(net, 1.0 / count)
        (torch.stack([losses(net, b).sum() for b in batches]).sum() / count).backward()
        norms.append(optimizer.step().grad_norm)
    return {n: gather_logical(p, layout_of(p), Mesh.serial()) for n, p in logical_parameters(net)}, norms


def test_16_bits_with_main_parameters_follow() -> None:
    """bf16 products; weights in bf16 and fp16 with fp32 main parameters."""
    config = dataclasses.replace(MUON, muon_fp32_matmul_prec="medium", loss_scale=8.0, lr=0.01)
    finals = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        net = nn.Linear(24, 16).to(dtype)
        optimizer = build_optimizer(config, net, Mesh.serial())
        for step in range(10):
            x = torch.randn(32, 24, generator=torch.Generator().manual_seed(step)).to(dtype)
            net.zero_grad()
            optimizer.scale_loss(net(x).float().square().mean()).backward()
            optimizer.step()
        finals.append(optimizer.params[0].main.detach().clone())
        assert optimizer.params[0].main.dtype == torch.float32
    assert all(distance(final, finals[0]) < 0.05 for final in finals[1:])


def refused(words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args(("--mock-data --train-iters 1 " + words).split(), 2)
    return str(error.value)


def test_what_does_not_combine_is_refused() -> None:
    assert "Muon needs whole matrices" in refused("--optimizer muon --use-distributed-optimizer")
    assert "dist_muon and no sharding" in refused("--optimizer dist_muon --use-torch-fsdp2")
    assert "a multiple of 5" in refused("--optimizer muon --muon-num-ns-steps 6")
    with pytest.raises(ConfigError, match="at least 8"):
        OptimizerConfig(muon_coefficient_type="polar_express")
    net = nn.Linear(4, 4, bias=False)
    shard = {"weight": Shard(slice(0, 8), torch.zeros(8), net.weight.detach().view(-1)[:8])}
    with pytest.raises(ConfigError, match="a range of"):
        build_optimizer(MUON, net, Mesh.serial(), shard)
    words = "--mock-data --train-iters 1 --optimizer muon --tensor-model-parallel-size 2"
    assert parse_args(words.split(), 2).optimizer.muon_tp_mode == "blockwise", "Megatron's command line"


def cut(rank: int, world: int, mode: str) -> str:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    net = GPTModel(Case({TP: world}).config, mesh)
    build_optimizer(dataclasses.replace(MUON, muon_tp_mode=mode), net, mesh)
    return "built"


@pytest.mark.parametrize("mode", ["blockwise", "distributed"])
def test_a_part_that_cuts_through_q_k_v_is_refused(ranks: Any, mode: str) -> None:
    """Two groups on four ranks."""
    from minimegatron.errors import RankError

    with pytest.raises(RankError, match="a group of q, k, v has 32"):
        ranks(4).run(cut, mode)


def test_a_run_with_muon_learns() -> None:
    small = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    words = small + "--mock-data --train-iters 12 --lr 0.02 --muon-extra-scale-factor 0.2 --optimizer dist_muon"
    trainer = build_trainer(parse_args(words.split()), quiet=True)
    trainer.train()
    losses = [report.losses["lm loss"] for report in trainer.history]
    assert losses[-1] < losses[0] - 0.1
