"""The formulas that papers print, against the numbers that they print."""

from __future__ import annotations

from fractions import Fraction

import pytest

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.schedule_sim import Costs, live_activations, simulate
from minimegatron.parallel.pipeline.schedules import build_schedule
from minimegatron.planner import closed_forms as forms

WORDS, LENGTH = 51_200, 2_048
SIZES = [  # layers, h, billions of parameters: table 1 of arXiv 2104.04473
    (24, 2304, 1.65), (30, 3072, 3.56), (36, 4096, 7.47), (40, 6144, 18.45), (48, 8192, 39.10), (60, 10240, 76.05),
    (80, 12288, 145.62), (96, 16384, 310.13), (105, 20480, 529.60), (128, 25600, 1008.04),
]  # fmt: skip
# name: layers, h, heads, batch, model FLOPs, overhead of selective recompute in percent
MODELS = {
    "22B": (48, 6144, 64, 4, 1.1436e15, 5.19),
    "175B": (96, 12288, 96, 64, 1.4109e17, 2.69),
    "530B": (105, 20480, 128, 280, 1.8522e18, 1.64),
    "1T": (128, 25600, 160, 512, 6.4259e18, 1.31),
}
METHODS = ("none", "tp", "tp sp", "tp selective", "tp sp selective", "full")
GIGABYTES = {  # of a layer, b = 1, s = 2048, t = 8
    "22B": (1.770, 0.331, 0.221, 0.164, 0.053, 0.025),
    "175B": (2.869, 0.579, 0.359, 0.327, 0.107, 0.050),
    "530B": (4.110, 0.881, 0.514, 0.545, 0.178, 0.084),
    "1T": (5.138, 1.101, 0.642, 0.682, 0.223, 0.105),
}
SAVED = {"22B": 75.8, "175B": 70.2, "530B": 65.3, "1T": 65.3}  # of all activations, by selective recompute, percent


@pytest.mark.parametrize("layers, h, billions", SIZES)
def test_parameters(layers: int, h: int, billions: float) -> None:
    assert round(forms.parameters(layers, h, WORDS, LENGTH) / 1e9, 2) == billions


@pytest.mark.parametrize("name", MODELS)
def test_flops_and_what_selective_recompute_adds(name: str) -> None:
    layers, h, _, batch, flops, overhead = MODELS[name]
    model = forms.model_flops(batch, LENGTH, layers, h, WORDS)
    selective = forms.hardware_flops(batch, LENGTH, layers, h, WORDS, "selective")
    assert f"{model:.4e}" == f"{flops:.4e}"
    assert round(100 * (selective / model - 1), 2) == overhead
    assert forms.hardware_flops(batch, LENGTH, layers, h, WORDS) == model


def test_flops_with_full_recompute_as_2021_counted_them() -> None:
    assert f"{forms.hardware_flops(1536, LENGTH, 80, 12288, WORDS, 'full'):.4e}" == "3.7611e+18"


@pytest.mark.parametrize("name", MODELS)
def test_activations_of_a_layer(name: str) -> None:
    _, h, a, *_ = MODELS[name]
    found = tuple(round(forms.layer_activations(method, LENGTH, 1, h, a, 8) / 1e9, 3) for method in METHODS)
    assert found == GIGABYTES[name]
    assert forms.layer_activations("full sp", LENGTH, 1, h, a, 8) == 2 * LENGTH * h / 8
    whole, kept = (forms.layer_activations(f"tp sp{way}", LENGTH, 1, h, a, 8) for way in ("", " selective"))
    assert round(100 * (1 - kept / whole), 1) == SAVED[name]


@pytest.mark.parametrize("zero, gigabytes", [(0, 120.0), (1, 31.41), (2, 16.64), (3, 1.88)])
def test_zero_by_its_paper(zero: int, gigabytes: float) -> None:
    assert round(forms.state_bytes(7.5e9, 64, zero, "zero") / 1e9, 2) == gigabytes


@pytest.mark.parametrize("flavour, held, shared", [
    ("fp16, fp16 gradients", 4, 16), ("bf16, fp32 gradients", 6, 12), ("fp32", 8, 8),
])  # fmt: skip
def test_megatrons_bytes_of_a_parameter(flavour: str, held: int, shared: int) -> None:
    assert forms.state_bytes(1, 64, 0, flavour) == held + shared
    assert forms.state_bytes(1, 64, 1, flavour) == held + shared / 64


@pytest.mark.parametrize("name, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 16)])
def test_the_bubble_is_that_of_the_simulated_schedule(name: str, v: int, p: int, m: int) -> None:
    schedule = build_schedule(name, p, m, v)
    assert simulate(schedule, Costs().divided(v)).bubble == forms.bubble(p, m, v) == Fraction(p - 1, v * m)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_microbatches_under_way_are_those_of_the_schedule(name: str) -> None:
    live = live_activations(build_schedule(name, 4, 6))
    assert [max(row) for row in live] == [forms.in_flight(name, 4, 6, rank) for rank in range(4)]


def test_volumes() -> None:
    assert forms.sent("all_reduce", 12, 4) == 18 and forms.sent("all_gather", 12, 4) == 9
    assert forms.tensor_parallel_volume(8, 1, 4, 4) == 8 * 32 * 3 / 4
    assert forms.tensor_parallel_volume(8, 1, 4, 4, regathered=True) == 10 * 32 * 3 / 4
    assert forms.crossover_tokens(4096) == 18_432


def test_a_word_that_is_no_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `tp sp`"):
        forms.layer_activations("tp-sp", 1, 1, 1, 1)
