"""Transformer Engine's linear layers and FP8 behind our interface: NVIDIA's products, the same model.

`--transformer-impl transformer_engine` builds attention and MLP with `TEColumnParallelLinear` and `TERowParallelLinear`
(`models/gpt_layer_specs.py`). They are the library's own `Linear`, which does products and collectives over tp, and
carry our `ParamLayout`: names, shapes, initial values, checkpoints and norms are those of `layers/linear.py`. Norms and
the core of attention stay what `kernels` and `attention_backend` say.

**FP8.** The `fp8_...` fields become a recipe of the library; a context around the layers says where it holds:

| `fp8_recipe` | Transformer Engine     | context around |
|--------------|------------------------|----------------|
| `delayed`    | `DelayedScaling`       | a whole stage, whose magnitudes travel together at its end |
| `tensorwise` | `Float8CurrentScaling` | a layer, so that first and last layers can do without      |
| `blockwise`  | `Float8BlockScaling`   | a layer                                                    |
| `mxfp8`      | `MXFP8BlockScaling`    | a layer                                                    |

The library keeps scales in the module's extra state, which `state_dict` has.

It needs a GPU and the package, which is checked before anything is built. Recompute of a module that holds its layers,
and schedules that defer wgrad, are refused: the library has its own ways for both.

Written for Transformer Engine 2.x. Megatron-LM: `megatron/core/extensions/transformer_engine.py`,
`get_fp8_context` in `megatron/core/fp8_utils.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.config.model import TransformerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.errors import ConfigError, require
from minimegatron.layers.attention.choice import PACKAGES, installed
from minimegatron.layers.fp8.linear import ParallelFp8
from minimegatron.layers.param import Init, ParamLayout, cut_evenly


def check_transformer_engine(config: TransformerConfig, parallel: ParallelConfig) -> None:
    """Refuse combinations that are not supported with Transformer Engine; does nothing for `transformer_impl` local.

    Raises:
        ConfigError: the package is missing, or a combination is not supported with it.
    """
    if config.transformer_impl == "local":
        return
    if not installed("te"):
        package = PACKAGES["te"][1]
        raise ConfigError(
            f"transformer_impl transformer_engine needs the package {package}, which is not installed",
            fix=f"pip install '{package}' on a machine with a GPU, or --transformer-impl local",
        )
    require(
        config.fp8_wgrad,
        "fp8_wgrad off with transformer_impl transformer_engine, whose recipes have no such choice any more",
        "drop --no-fp8-wgrad, or --transformer-impl local",
    )
    inside = config.recompute_granularity == "full" or config.recomputes("mlp")
    require(
        not (inside and config.fp8_format),
        "recompute of whole layers or of the MLP with transformer_impl transformer_engine and FP8: torch's recompute "
        "would show the library every magnitude twice",
        "--recompute-modules core_attn, or --transformer-impl local",
    )
    require(
        (parallel.pipeline_schedule or "1f1b") in ("gpipe", "1f1b", "interleaved"),
        f"pipeline_schedule {parallel.pipeline_schedule} with transformer_impl transformer_engine, whose layers do not "
        "put the gradients of weights off",
        "--pipeline-schedule 1f1b or interleaved, or --transformer-impl local",
    )


# ------------------------------------------------------------------------------------------------ FP8


def te_recipe(config: TransformerConfig, axis: Axis) -> Any:
    """The library's recipe for the model's `fp8_...` fields; amax is reduced if the axis has several ranks."""
    from transformer_engine.common import recipe

    formats = {"e4m3": recipe.Format.E4M3, "hybrid": recipe.Format.HYBRID}
    fp8_format = formats[config.fp8_format or "hybrid"]
    if config.fp8_recipe == "delayed":
        return recipe.DelayedScaling(
            margin=config.fp8_margin,
            fp8_format=fp8_format,
            amax_history_len=config.fp8_amax_history_len,
            amax_compute_algo=config.fp8_amax_compute_algo,
            reduce_amax=axis.size > 1,  # with no group it would take the whole world for one
        )
    kinds = {
        "tensorwise": recipe.Float8CurrentScaling,
        "blockwise": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }
    return kinds[config.fp8_recipe](fp8_format=fp8_format)


def fp8_context(
    config: TransformerConfig, mesh: Mesh, layer_number: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """The context in which the library computes in FP8: of a stage (`layer_number` None) or of a layer, as its recipe
    needs."""
    outer = config.fp8_recipe == "delayed"
    if config.transformer_impl == "local" or config.fp8_format is None or outer != (layer_number is None):
        return contextlib.nullcontext()
    if layer_number is not None and not config.fp8_layer(layer_number):
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te

    axis = mesh.tp_cp if config.tp_only_amax_red else mesh.tp_dp_cp
    recipe = te_recipe(config, axis)
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=axis.group)  # type: ignore[no-any-return]
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=axis.group)  # type: ignore[no-any-return]


def autocast_layers(stack: nn.Module, layers: Iterable[Any], config: TransformerConfig, mesh: Mesh) -> None:
    """From now on a stack of layers, or each of its layers, runs inside `fp8_context`.

    Args:
        stack: the module that runs the layers.
        layers: its `TransformerLayer`s.
        config, mesh: the model, its layout.
    """
    _run_inside(stack, partial(fp8_context, config, mesh))
    stack.check_generation = ParallelFp8.check_generation  # type: ignore[assignment]
    for layer in layers:
        _run_inside(layer, partial(fp8_context, config, mesh, layer.layer_number))


def _run_inside(module: nn.Module, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """From now on `module(...)` runs inside a context, made for each call. In place: parameters keep their names."""

    def forward(self: nn.Module, *args: Any) -> Any:
        with context():
            return type(self).forward(self, *args)

    module.forward = MethodType(forward, module)


# ------------------------------------------------------------------------------------------------ layers


@functools.cache
def _linear() -> Any:
    """The library's `Linear` with our parameters; the class is made on demand, because importing the library needs
    CUDA."""
    import transformer_engine.pytorch as te

    class Linear(te.Linear):
        def __init__(
            self, sizes: tuple[int, int], tp: Axis, mode: str, bias: bool, sequence_parallel: bool, dtype: torch.dtype
        ) -> None:
            super().__init__(
                in_features=sizes[0],
                out_features=sizes[1],
                sequence_parallel=sequence_parallel and tp.size > 1,
                tp_group=tp.group,
                tp_size=tp.size,
                bias=bias,
                params_dtype=dtype,
                parallel_mode=mode,
                device="meta",
            )

        def describe(self, weight: ParamLayout, bias: ParamLayout | None) -> None:
            """Attach the layouts of the parameters, and allocate them unless modules are built on the meta device."""
            layouts = {"weight": weight, **({"bias": bias} if bias is not None else {})}
            for name, layout in layouts.items():
                empty = torch.empty(layout.local_shape, dtype=self.weight.dtype)
                setattr(self, name, nn.Parameter(empty))
                getattr(self, name).param_layout = layout

    return Linear


def TEColumnParallelLinear(
    input_size: int,
    output_size: int,
    tp: Axis,
    *,
    init: Init,
    bias: bool = True,
    sequence_parallel: bool = False,
    gather_output: bool = False,
    gather_reduces_gradient: bool = False,
    blocks: int = 1,
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """`layers.linear.ColumnParallelLinear` by Transformer Engine; the same arguments."""
    parts = cut_evenly(output_size, tp, f"TEColumnParallelLinear({input_size}, {output_size})", blocks)
    layer = _linear()((input_size, output_size), tp, "column", bias, sequence_parallel, dtype)
    layer.describe(
        ParamLayout((output_size, input_size), 0, parts, tp.rank, init, rows=rows),
        ParamLayout((output_size,), 0, parts, tp.rank, rows=rows) if bias else None,
    )
    if gather_output:
        layer.register_forward_hook(
            lambda module, args, y: c.gather_from_region(y, tp, reduce_gradient=gather_reduces_gradient)
        )
    return layer  # type: ignore[no-any-return]


def TERowParallelLinear(
    input_size: int,
    output_size: int,
    tp: Axis,
    *,
    init: Init,
    bias: bool = True,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """`layers.linear.RowParallelLinear` by Transformer Engine; x arrives cut over tp."""
    parts = cut_evenly(input_size, tp, f"TERowParallelLinear({input_size}, {output_size})")
    layer = _linear()((input_size, output_size), tp, "row", bias, sequence_parallel, dtype)
    layer.describe(
        ParamLayout((output_size, input_size), 1, parts, tp.rank, init),
        ParamLayout((output_size,), partial="sequence") if bias else None,
    )
    return layer  # type: ignore[no-any-return]
