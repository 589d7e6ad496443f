"""MTP, FP8, Muon, optimizer states in few bits and in the host's memory, FSDP2: what they send, compute and hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.config.optimizer import coefficients_of
from minimegatron.config.run import RunConfig
from minimegatron.footprint.events import Unpredicted
from minimegatron.footprint.states import meta_model, meta_wrapper
from minimegatron.layers.param import layout_of
from minimegatron.models.families import family_config
from minimegatron.optim.muon import newton_schulz
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.pass_time import PEAK
from minimegatron.planner.planning import plan
from minimegatron.planner.search import search
from minimegatron.planner.timing import step_time
from minimegatron.planner.update import muon_products, optimizer_of, update_time
from minimegatron.training.arguments import parse_args
from minimegatron.training.flops import step_flops
from tests.planner.test_timing import FREE
from tests.planner.test_traffic import ENDS, EQUAL, LATENT, SIZES, TWO, run_of, told_and_counted
from tests.thorough import SLOW

H100 = CLUSTERS["h100"]
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP2, PP2 = ({f"{axis}_parallel_size": 2} for axis in ("context", "pipeline_model"))
FP8 = {"fp8_format": "hybrid", "params_dtype": "bf16", "hidden_size": 64, "ffn_hidden_size": 128}
FULL = {"recompute_granularity": "full"}
SENT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # layout, model, optimizer
    "two more tokens, cp": (TP2 | CP2, {"mtp_num_layers": 2, "position_embedding_type": "learned_absolute"}, {}),
    "one more token, pp, recompute": (TP2 | PP2, {"mtp_num_layers": 1, **FULL}, {}),
    "one more token, experts": (TP2 | PP2, EQUAL | {"mtp_num_layers": 1}, {}),
    "delayed": (TP2, FP8 | {"fp8_recipe": "delayed"}, {}),
    "current, recompute": (TP2 | PP2, FP8 | FULL, {}),
    "current, no sp": ({"tensor_model_parallel_size": 4}, FP8, {}),
    "current, latent": (TP2, FP8 | LATENT | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16,
                                            "qk_pos_emb_head_dim": 16, "v_head_dim": 16}, {}),
    "delayed experts": (TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
                        FP8 | EQUAL | {"fp8_recipe": "delayed"}, {}),
    "muon": (TP2, {}, {"optimizer": "muon"}),
    "muon together": (TP2, {}, {"optimizer": "muon", "muon_tp_mode": "distributed"}),
    "muon by owner": ({}, EQUAL, {"optimizer": "dist_muon"}),
    "few bits": ({"data_parallel_sharding_strategy": "optim"}, {"params_dtype": "bf16"},
                 {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"}),
}  # fmt: skip


def of_optimizer(run: RunConfig, **fields: Any) -> RunConfig:
    return dataclasses.replace(run, optimizer=OptimizerConfig(**fields))


@SLOW
@pytest.mark.parametrize(
    "names",
    [
        ["one more token, pp, recompute", "current, no sp", "muon"],
        pytest.param(list(SENT), marks=pytest.mark.thorough),
    ],
)
def test_what_they_send_is_what_a_traced_step_counts(ranks: Any, names: list[str]) -> None:
    runs = [
        of_optimizer(run_of(layout, TWO | model, 4, 2), **optimizer)
        for layout, model, optimizer in map(SENT.__getitem__, names)
    ]
    told_and_counted(ranks, runs, 4, ENDS)


def wrapper_of(run: RunConfig, world: int = 1) -> DistributedDataParallel:
    mesh = Mesh.planned(run.parallel, 0, world)
    return meta_wrapper(meta_model(run.model, mesh, run.optimizer), mesh, run.optimizer)


BF16 = {"params_dtype": "bf16"}
AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, optimizer, nbytes",  # of an element: states read and written, two gradients, the weight written (and read)
    [
        (BF16, {}, 2 * 12 + 8 + 2),
        ({}, {}, 2 * 8 + 8 + 8),
        (BF16, {"optimizer": "sgd", "sgd_momentum": 0.9}, 2 * 8 + 8 + 2),
        (BF16, AWARE, 2 * (2 + 2 + 1) + 3 * 16 + 8 + 2),
    ],
)
def test_bytes_that_an_update_touches(model: dict[str, Any], optimizer: dict[str, Any], nbytes: int) -> None:
    run = of_optimizer(RunConfig(family_config("llama", **SIZES, **model)), **optimizer)
    ddp, one = wrapper_of(run), H100.replace(copy=1.0, copy_share=1.0)
    count = sum(p.numel() for p in ddp.module.parameters())
    assert update_time(ddp, run.optimizer, one) == pytest.approx(nbytes * count, rel=0.002)


def test_the_hosts_share_of_an_update() -> None:
    run = RunConfig(family_config("llama", **SIZES, **BF16))
    some, whole = ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": f} for f in (0.5, 1.0))
    slow = H100.replace(copy=1e30, bus=1.0, host=2.0)
    ddp = wrapper_of(run)
    count = sum(p.numel() for p in ddp.module.parameters())
    assert update_time(ddp, OptimizerConfig(**whole), slow) == pytest.approx(count * (4 + 34 / 2 + 2))
    overlaps = OptimizerConfig(**whole, overlap_cpu_optimizer_d2h_h2d=True)
    assert update_time(ddp, overlaps, slow) == pytest.approx(count * 34 / 2)
    assert 0.5 <= update_time(ddp, OptimizerConfig(**some), slow) / count / (4 + 34 / 2 + 2) < 0.7
    with pytest.raises(Unpredicted, match="memory of the host"):
        update_time(ddp, overlaps, H100.replace(bus=0.0))


@pytest.mark.parametrize("mode", ["duplicated", "distributed", "blockwise"])
def test_products_of_muon_are_those_that_its_iteration_computes(mode: str) -> None:
    layout = ParallelConfig(tensor_model_parallel_size=2)
    model = family_config("llama", **SIZES, add_qkv_bias=False)
    run = of_optimizer(RunConfig(model, layout), optimizer="muon", muon_tp_mode=mode)
    ddp = wrapper_of(run, 2)
    optimizer = optimizer_of(ddp, run.optimizer)
    told, counted = sum(product.flops for product in muon_products(ddp, run.optimizer)), 0
    for p in (p for p in optimizer.params if p.rates.matrix):
        place = layout_of(p.model)
        shape = list(place.shape if mode == "duplicated" else place.local_shape)
        dim = (place.dim or 0) if mode == "distributed" and place.sharded else None
        rows = [shape[0] // sum(place.fused) * part for part in place.fused] or [shape[0]]
        for m in rows:
            x = torch.empty(shape[1], m) if dim == 0 else torch.empty(m, shape[1])  # its Gram matrix is the smaller one
            x = x if dim is None or x.shape[0] <= x.shape[1] else x.mT
            with FlopCounterMode(display=False) as flops:
                newton_schulz(x.to("meta"), coefficients_of("quintic", 5), torch.bfloat16)
            counted += flops.get_total_flops()
    if mode != "distributed":
        assert told == counted > 0
    assert told >= counted, "together the Gram matrix is that of the side that is whole"


def test_fp8_halves_the_time_of_products_and_nothing_else() -> None:
    """No weights' casts; the output layer, the scores and the router stay in bf16."""
    free = FREE.replace(fp8=2 * FREE.matmul)
    model = {**SIZES, "hidden_size": 64, "ffn_hidden_size": 128, "params_dtype": "bf16"}
    plain, fp8 = (
        step_time(run_of({}, {**model, **more}, 1), 1, free).parts[PEAK] for more in ({}, {"fp8_format": "hybrid"})
    )
    matrices = 4 * (64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128)
    assert plain - fp8 == pytest.approx(3 * 2 * matrices * 16 * 32 / 2 / free.matmul / 2 * 1, rel=1e-6)
    with pytest.raises(Unpredicted, match="FP8 products of A100"):
        step_time(run_of({}, {**model, "fp8_format": "hybrid"}, 1), 1, CLUSTERS["a100"])


def test_a_depth_takes_the_time_of_its_layer_its_projection_and_its_logits() -> None:
    some, none = (run_of({}, {**SIZES, **more}, 1) for more in ({"mtp_num_layers": 1}, {}))
    more = step_flops(some.model, 8, 32) - step_flops(none.model, 8, 32)
    seconds = (step_time(some, 1, FREE).parts[PEAK] - step_time(none, 1, FREE).parts[PEAK]) * FREE.matmul
    assert more < seconds < 1.1 * more, "scores are computed once more on the way back"


WORDS = "--preset laptop-10m --bf16 --seq-length 1024 --micro-batch-size 2 --global-batch-size 16"


@pytest.mark.parametrize(
    "flags",
    [
        "--mtp-num-layers 1",
        "--fp8-format hybrid",
        "--optimizer muon",
        "--optimizer dist_muon",
        "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "--use-torch-fsdp2",
        "--spec tests.extension.retention layers",
    ],
)
def test_each_is_planned_whole(flags: str) -> None:
    told = plan(parse_args(f"{WORDS} {flags}".split(), 4, reads=False), 4, H100)
    assert told.unknown == () and told.fits and told.time is not None
    assert sum(told.time.parts.values()) == pytest.approx(told.time.seconds) and told.messages()


@SLOW
def test_a_search_with_muon_keeps_matrices_whole() -> None:
    found = search(parse_args(f"{WORDS} --optimizer muon --num-layers 2".split(), reads=False), 2, H100)
    assert {one.layout.zero for one in found} == {0}


def test_fsdp2_gathers_and_sums_as_zero_3() -> None:
    one, other = (
        plan(parse_args(f"{WORDS} {flag}".split(), 4, reads=False), 4, H100)
        for flag in ("--use-torch-fsdp2", "--data-parallel-sharding-strategy optim_grads_params")
    )
    assert one.messages() == other.messages() and one.bytes != other.bytes


@pytest.mark.parametrize(
    "optimizer, what",
    [({"optimizer": "muon", "muon_fp32_matmul_prec": "high"}, "Muon's products in fp32"),
     ({"freeze": ("*linear_fc*",)}, "frozen")],
)  # fmt: skip
def test_what_has_no_time_is_said(optimizer: dict[str, Any], what: str) -> None:
    with pytest.raises(Unpredicted, match=what):
        step_time(of_optimizer(run_of({}, SIZES, 1), **optimizer), 1, H100)


@pytest.mark.parametrize("more", [{"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, {"fp8_wgrad": False}])
def test_every_recipe_of_fp8_has_a_time(more: dict[str, Any]) -> None:
    assert step_time(run_of({}, {**SIZES, **FP8, **more}, 1), 1, H100).seconds > 0
