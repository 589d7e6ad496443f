"""Mamba-2: in place of attention, a state of fixed size that each token changes and reads.

The problem in a sentence: attention keeps all tokens and reads them all again for the next one.

    z, x, B, C, dt = x_in A_in^T                         one column-parallel product
    x, B, C        = silu(causal convolution of each channel with k taps)
    dt             = softplus(dt + dt_bias)
    g              = -exp(A_log) dt
    y              = SSD(x, dt, g, B, C) + D x           `layers/ssm/scan`
    out            = norm(y * silu(z)) A_out^T           row-parallel

| tensor                    | shape, heads and groups of this rank          |
|---------------------------|-----------------------------------------------|
| z, x                      | [s, b, heads, p]                              |
| B, C                      | [s, b, groups, n]                             |
| dt, g                     | [s, b, heads]                                 |
| state of a sequence       | [heads, p, n] in fp32, and the last k - 1 tokens' x, B, C before the convolution |

**Over tp** a rank has whole groups and the heads that read them. So the five blocks of A_in are cut each by itself, the
norm takes its mean over a group and never over ranks, and no message lies between the two products. tp must divide the
groups.

**Over cp** states pass from piece to piece (`layers/ssm/pieces`). **Documents** of a packed sequence begin with a state
of zeros and see no tap of the one before. **In generation** a layer keeps its state and the convolution's last inputs;
a token costs the same whatever came before it.

`A_log`, `dt_bias` and what is made of them are computed in fp32. Like norms, they and D do not decay, as they are 1-D.

Dao and Gu 2024 (arXiv 2405.21060). Megatron-LM: `megatron/core/ssm/mamba_mixer.py`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.config.fields import divides
from minimegatron.layers.inference_context import LayerState, StateSpec
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.layers.recompute import recompute_module
from minimegatron.layers.ssm.convolution import CausalConv1d, segments_of, uniform
from minimegatron.layers.ssm.pieces import OverPieces, Pieces
from minimegatron.layers.ssm.scan import Scan, step

if TYPE_CHECKING:
    from minimegatron.comm.axis import Axis
    from minimegatron.comm.mesh import Mesh
    from minimegatron.comm.random import RngStreams
    from minimegatron.config import TransformerConfig
    from minimegatron.layers.attention.self_attention import AttentionContext

A_RANGE, DT_RANGE, DT_LEAST = (1.0, 16.0), (1e-3, 1e-1), 1e-4  # of initial values, as in Megatron-LM


def initial_A_log(z: torch.Tensor) -> torch.Tensor:
    """Of normal numbers; A is uniform in `A_RANGE`."""
    return uniform(z, *A_RANGE).log()


def initial_dt_bias(z: torch.Tensor) -> torch.Tensor:
    """Of normal numbers; softplus makes of them numbers whose logarithms are uniform in `DT_RANGE`."""
    dt = uniform(z, *map(math.log, DT_RANGE)).exp().clamp(min=DT_LEAST)
    return dt + (-torch.expm1(-dt)).log()


class GatedNormFunction(torch.autograd.Function):
    """`GatedNorm`, which keeps its inputs and 1 / rms; autograd would keep five more tensors in fp32.

    With u = y silu(z), n = u / rms and g the gradient of n, that of u is (g - n mean(g n)) / rms.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        u = (y * F.silu(z.to(y.dtype))).unflatten(-1, (groups, -1))
        inverse = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
        ctx.groups = groups
        ctx.save_for_backward(y, z, weight, inverse)
        return (u * inverse).flatten(-2).to(weight.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (y, z, weight, inverse), dout = ctx.saved_tensors, grads[0]
        wide = z.to(y.dtype)
        gate = F.silu(wide)
        n = (y * gate).unflatten(-1, (ctx.groups, -1)).mul_(inverse)
        dweight = (dout * n.flatten(-2)).flatten(0, -2).sum(0).to(weight.dtype)
        g = (dout * weight).to(y.dtype).unflatten(-1, (ctx.groups, -1))
        du = (g - n * (g * n).mean(-1, keepdim=True)).mul_(inverse).flatten(-2)
        dz = torch.ops.aten.silu_backward(du * y, wide)
        return du.mul_(gate), dz.to(z.dtype), dweight, None, None


class GatedNorm(nn.Module):
    """RMSNorm of y * silu(z) over the channels of each group; gamma is cut over tp as the groups are.

    Args:
        config: epsilon, dtype, groups.
        width: channels of all groups together.
        tp: the axis that shares the groups.
    """

    def __init__(self, config: TransformerConfig, width: int, tp: Axis) -> None:
        super().__init__()
        self.eps, self.groups = config.layernorm_epsilon, config.mamba_num_groups // tp.size
        parts = cut_evenly(width, tp, f"GatedNorm({width})")
        self.weight = new_parameter(ParamLayout((width,), 0, parts, tp.rank, Init(value=1.0)), config.dtype)

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y [s, b, width / t] in fp32, z of the same shape -> the same shape in the model's dtype."""
        return GatedNormFunction.apply(y, z, self.weight, self.groups, self.eps)  # type: ignore[no-any-return]


class MambaMixer(nn.Module):
    """The projections, the convolution, the recurrence and the gated norm; in place of `SelfAttention`.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number from 0.
        rng: dropout streams; there is no dropout.

    Raises:
        ConfigError: the groups cannot be divided over tp.
    """

    supports_context_parallel = True

    def __init__(
        self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: RngStreams | None = None
    ) -> None:
        super().__init__()
        self.layer_number, self.mesh, tp, dtype = layer_number, mesh, mesh.tp, config.dtype
        heads, groups = config.mamba_num_heads, config.mamba_num_groups
        divides(tp.size, groups, "tensor_model_parallel_size", "mamba_num_groups")
        inner, shared = heads * config.mamba_head_dim, groups * config.mamba_state_dim
        self.heads, self.groups, self.p, self.n = (
            heads // tp.size, groups // tp.size, config.mamba_head_dim, config.mamba_state_dim,
        )  # fmt: skip
        self.limits = config.mamba_dt_limit_min, config.mamba_dt_limit_max
        self.sizes = [size // tp.size for size in (inner, inner + 2 * shared, heads)]  # z; x, B and C; dt
        blocks = (inner, inner, shared, shared, heads)
        how: dict[str, Any] = {"bias": False, "sequence_parallel": mesh.sequence_parallel, "dtype": dtype}
        std, out = Init(std=config.init_method_std), Init(std=config.output_init_std)
        self.in_proj = ColumnParallelLinear(config.hidden_size, sum(blocks), tp, init=std, blocks=blocks, **how)
        self.conv1d = CausalConv1d(blocks[1:4], config.mamba_conv_kernel, tp, dtype)

        def of_heads(init: Init) -> nn.Parameter:
            parts = cut_evenly(heads, tp, "the heads of a MambaMixer")
            return new_parameter(ParamLayout((heads,), 0, parts, tp.rank, init), dtype)

        self.A_log = of_heads(Init(std=1.0, of=initial_A_log))
        self.dt_bias = of_heads(Init(std=1.0, of=initial_dt_bias))
        self.D = of_heads(Init(value=1.0))
        self.ssd = OverPieces(functools.partial(Scan, kernels=config.kernels), config.mamba_chunk_size, mesh)
        if config.recomputes("core_attn"):
            recompute_module(self.ssd, rng)
        self.norm = GatedNorm(config, inner, tp)
        self.out_proj = RowParallelLinear(inner, config.hidden_size, tp, init=out, **how)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        assert context.mask.causal, "a recurrence sees the past alone"
        z, xbc, dt = self.in_proj(x).split(self.sizes, -1)
        state = context.state_of(self.layer_number)
        y = self._trained(xbc, dt, context.mask.document_ids) if state is None else self._generated(xbc, dt, state)
        return self.out_proj(self.norm(y, z))  # type: ignore[no-any-return]

    def inference_state(self) -> dict[str, StateSpec]:
        """The convolution's last inputs, and h."""
        wide, reach = torch.promote_types(self.A_log.dtype, torch.float32), self.conv1d.kernel - 1
        return {
            "conv": StateSpec((reach, self.sizes[1]), "sequence"),
            "ssm": StateSpec((self.heads, self.p, self.n), "sequence", wide),
        }

    def _trained(self, xbc: torch.Tensor, dt: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """Inputs of the convolution [s, b, channels], dt [s, b, heads] -> y [s, b, heads p], of this rank's tokens."""
        reach = self.conv1d.kernel - 1
        segments = None if document_ids is None else segments_of(document_ids, reach)
        x, B, C = self._heads(self.conv1d.over(Pieces(len(xbc), self.mesh), xbc, segments))
        before = None if segments is None else segments[:, reach - 1 :]
        dt = self._dt(dt)
        y = self.ssd(before, x, dt, dt * self._A(), B, C)
        return self._skip(y, x)

    def _generated(self, xbc: torch.Tensor, dt: torch.Tensor, state: LayerState) -> torch.Tensor:
        """The same for the new tokens of a step, [n, 1, ...] -> [n, 1, heads p]; the state becomes that after them."""
        xbc, dt, new = state.padded(xbc), state.padded(dt), state.context.starts.diff()
        tail, h = state.read_sequences("conv", "ssm")
        convolved, tail = self.conv1d.generated(xbc, tail, new)
        x, B, C = self._heads(convolved)
        padding = torch.arange(len(dt), device=new.device)[:, None] >= new
        dt = self._dt(dt).masked_fill(padding[..., None], 0.0)  # it changes no state
        g = dt * self._A()
        if len(dt) == 1:
            y, h = step(x[0], dt[0], g[0], B[0], C[0], h)
            y = y[None]
        else:
            y, h = self.ssd.recurrence(x, dt, g, B, C, self.ssd.chunk_size).outputs(h)
        state.write_sequences(conv=tail, ssm=h)
        return state.unpadded(self._skip(y, x))

    def _heads(self, xbc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[s, b, channels] -> x [s, b, heads, p], B and C [s, b, groups, n]."""
        x, B, C = xbc.split([self.heads * self.p, self.groups * self.n, self.groups * self.n], -1)
        return x.unflatten(-1, (self.heads, self.p)), *(t.unflatten(-1, (self.groups, self.n)) for t in (B, C))

    def _dt(self, dt: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(dt.dtype, torch.float32)
        dt, (low, high) = F.softplus(dt.to(wide) + self.dt_bias.to(wide)), self.limits
        return dt if low == 0.0 and high is None else dt.clamp(low, high)

    def _A(self) -> torch.Tensor:
        return -self.A_log.to(torch.promote_types(self.A_log.dtype, torch.float32)).exp()

    def _skip(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y + D x, [s, b, heads p]."""
        return torch.addcmul(y, x.to(y.dtype), self.D.to(y.dtype)[:, None]).flatten(2)
