"""Transformer Engine behind our names: what is asked of it, and that the model stays the same.

The library needs a GPU. Here a stand-in takes exactly the arguments that Transformer Engine 2.20 takes and computes
with torch, so that a wrong name, a wrong layout or a context in the wrong place shows; what the library makes of them
does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers import transformer_engine as ours
from minimegatron.layers.param import Init, layout_of, logical_parameters
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

SIZES = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "ffn_hidden_size": 64}


class Format(enum.Enum):
    E4M3, E5M2, HYBRID = "e4m3", "e5m2", "hybrid"


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True


@dataclasses.dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


@dataclasses.dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3


@dataclasses.dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3


class Linear(nn.Module):
    """One rank's product; `device` must be said, as the library's default is a GPU."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False, tp_group: Any = None,
        tp_size: int = 1, bias: bool = True, params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: str = "cuda",
    ) -> None:  # fmt: skip
        super().__init__()
        assert device == "meta" and parallel_mode in ("column", "row")
        self.given = (parallel_mode, sequence_parallel, tp_group, tp_size)
        o, i = (
            (out_features // tp_size, in_features)
            if parallel_mode == "column"
            else (out_features, in_features // tp_size)
        )
        self.weight = nn.Parameter(torch.empty(o, i, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(o, dtype=params_dtype, device=device)) if bias else torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        events.append("linear")
        return F.linear(x, self.weight, self.bias if isinstance(self.bias, nn.Parameter) else None)


events: list[Any] = []


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None):
    events.append(recipe)
    yield
    events.append("end")


@pytest.fixture
def library(monkeypatch):
    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.common",
        "transformer_engine.common.recipe",
    )
    modules = {name: types.ModuleType(name) for name in names}
    modules["transformer_engine.pytorch"].__dict__.update(Linear=Linear, autocast=autocast)
    recipes = {
        c.__name__: c for c in (Format, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
    }
    modules["transformer_engine.common.recipe"].__dict__.update(recipes)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    monkeypatch.setattr(ours, "installed", lambda backend: True)
    ours._linear.cache_clear()
    events.clear()
    yield
    ours._linear.cache_clear()


def results(family: str, **fields: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build_model(family_config(family, **SIZES, **fields), Mesh.serial(), seed=0)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = model(ids[:, :-1], labels=ids[:, 1:]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in logical_parameters(model)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_model_and_its_parameters_are_the_same(library, family):
    want, wanted = results(family)
    assert not events
    got, found = results(family, transformer_impl="transformer_engine")
    assert events.count("linear") == 4 * 3
    assert found.keys() == wanted.keys()
    torch.testing.assert_close([got, *found.values()], [want, *(wanted[name] for name in found)])


@pytest.mark.parametrize(
    "fields, recipe",
    [
        ({"fp8_format": "e4m3"}, DelayedScaling(0, Format.E4M3, 1, "most_recent", reduce_amax=False)),
        (
            {"fp8_format": "hybrid", "fp8_margin": 1, "fp8_amax_history_len": 8, "fp8_amax_compute_algo": "max"},
            DelayedScaling(1, Format.HYBRID, 8, "max", reduce_amax=False),
        ),
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, Float8CurrentScaling(Format.HYBRID)),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, MXFP8BlockScaling(Format.E4M3)),
    ],
)
def test_every_recipe_has_its_context(library, fields, recipe):
    """A delayed one around the stage, the others around each layer, so that some can do without."""
    results("llama", transformer_impl="transformer_engine", **fields)
    delayed = isinstance(recipe, DelayedScaling)
    layers = ["linear"] * 4
    want = [recipe, *layers * 3, "end"] if delayed else [recipe, *layers, "end"] * 3
    assert events == want
    if not delayed:
        events.clear()
        results("llama", transformer_impl="transformer_engine", first_last_layers_bf16=True, **fields)
        assert events == [*layers, recipe, *layers, "end", *layers]


def test_block_scaling_and_groups(library):
    config = family_config(
        "llama", **{**SIZES, "hidden_size": 128, "ffn_hidden_size": 128}, fp8_format="e4m3", fp8_recipe="blockwise"
    )
    assert ours.te_recipe(config, Mesh.serial().tp) == Float8BlockScaling(Format.E4M3)
    two = Axis("tp_dp_cp", (0, 1), 0, None)
    assert ours.te_recipe(config.replace(fp8_recipe="delayed"), two).reduce_amax is True


def test_a_rank_of_two_holds_what_our_layer_would_hold(library):
    group = object()
    tp = Axis("tp", (0, 1), 1, group)  # type: ignore[arg-type]
    gated = ours.TEColumnParallelLinear(8, 24, tp, init=Init(), bias=False, sequence_parallel=True, blocks=2)
    assert gated.given == ("column", True, group, 2) and gated.weight.shape == (12, 8)
    assert layout_of(gated.weight).parts[1] == ((6, 12), (18, 24))
    row = ours.TERowParallelLinear(8, 6, tp, init=Init(), sequence_parallel=True)
    assert row.given == ("row", True, group, 2) and row.weight.shape == (6, 4)
    assert layout_of(row.bias).partial == "sequence"


def test_what_it_cannot_do_is_refused(library):
    config = family_config("llama", **SIZES, transformer_impl="transformer_engine", fp8_format="hybrid")
    with pytest.raises(ConfigError, match="every magnitude twice"):
        ours.check_transformer_engine(config.replace(recompute_granularity="full"), ParallelConfig())
    ours.check_transformer_engine(config.replace(recompute_granularity="selective"), ParallelConfig())
    zero_bubble = ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb_h1")
    with pytest.raises(ConfigError, match="zb_h1"):
        ours.check_transformer_engine(config, zero_bubble)


def test_without_the_package_it_says_what_to_install():
    config = family_config("llama", **SIZES, transformer_impl="transformer_engine")
    with pytest.raises(ConfigError, match="pip install 'transformer-engine"):
        build_model(config, Mesh.serial(), seed=0)
