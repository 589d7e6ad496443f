"""Operators for which a CPU build of torch has no kernel, or whose choice of a kernel differs on a GPU.

What a GPU refuses is refused here, with the reason; the numbers come from the plain formula. `attention` stands for
torch's `scaled_dot_product_attention` and records which of its programs a GPU would run (`sdp_utils.cpp`):

| choice      | when                                                                                 |
|-------------|--------------------------------------------------------------------------------------|
| `flash`     | bf16 or fp16, no table, q, k and v of one head width <= 256 (cuDNN may take its place) |
| `efficient` | otherwise, as long as queries and keys have equally many heads                       |
| `math`      | the rest: s x s memory, an operator at a time                                        |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from tests.rehearsal.capture import capturing, host_waits
from tests.rehearsal.generators import default, drawing_from
from tests.rehearsal.record import RECORD, place
from tests.rehearsal.rules import MixedDevices
from tests.rehearsal.tensor import CudaTensor

HALF = (torch.bfloat16, torch.float16)
E5M2 = torch.float8_e5m2


def require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"{what}, at {place()}")


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """cuBLASLt's FP8 product: rows times columns, k and n multiples of 16, not two E5M2."""
    shapes = f"_scaled_mm of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
    require(a.dtype.itemsize == b.dtype.itemsize == 1 and a.dtype.is_floating_point, f"{shapes}: both must be FP8")
    require(not (a.dtype == b.dtype == E5M2), f"{shapes}: multiplication of two Float8_e5m2 matrices is not supported")
    require(a.stride(1) == 1 and b.stride(0) == 1, f"{shapes}: a must be row-major and b column-major")
    require(
        a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0,
        f"{shapes}: trailing dimension of a and both of b must be divisible by 16",
    )
    require(a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0, f"{shapes}: an operand is not aligned to 16 bytes")
    require(scale_a.dtype == scale_b.dtype == torch.float32, f"{shapes}: scales must be fp32")
    one = scale_a.numel() == scale_b.numel() == 1
    rows = scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
    require(one or rows, f"{shapes}: scales {tuple(scale_a.shape)} and {tuple(scale_b.shape)} are not simulated")
    require(one or out_dtype == torch.bfloat16, f"{shapes}: row-wise scales give bf16 only")
    RECORD.choice(f"_scaled_mm, fast accumulation {use_fast_accum}")
    y = (a.float() * scale_a) @ (b.float() * scale_b)
    return (y if bias is None else y + bias.float()).to(out_dtype or a.dtype)


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
    """With `out_dtype`, which a CPU build lacks: a product of 16-bit numbers that stays in fp32."""
    if out_dtype is None:
        return torch.mm(a, b, **more)
    fits = a.dtype == b.dtype and (out_dtype == a.dtype or (a.dtype in HALF and out_dtype == torch.float32))
    require(fits, f"mm of {a.dtype} and {b.dtype} with a result in {out_dtype}")
    RECORD.choice(f"mm of {str(a.dtype)[6:]} with a result in {str(out_dtype)[6:]}")
    return (a.float() @ b.float()).to(out_dtype)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One kernel in bf16; in other dtypes torch reads the offsets on the host and multiplies group by group."""
    for name, x in (("a", a), ("b", b)):
        dense = x.stride(-1) == 1 or x.stride(-2) == 1
        row = x.stride(-2) if x.stride(-1) == 1 else x.stride(-1)
        require(dense, f"grouped_mm: {name} has strides {x.stride()}, none of its last two dims is dense")
        if a.dtype == torch.bfloat16:
            fits = row * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
            require(fits, f"grouped_mm: strides of {name} {x.stride()} must be multiples of 16 bytes")
    if a.dtype == torch.bfloat16:
        RECORD.choice("grouped_mm: one kernel")
    else:
        RECORD.choice(f"grouped_mm: a loop, because of {a.dtype}")
        host_waits("grouped_mm reads its offsets")
    return torch.ops.aten._grouped_mm.default(a, b, offs, bias, out_dtype)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Flash attention as an operator: (out, log of the sum of weights, and seven values that its backward wants)."""
    _check_flash(q, k, v, dropout_p)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    none, state = torch.empty(0), torch.zeros(2, dtype=torch.uint64)
    return out, lse, none, none.clone(), q.shape[2], k.shape[2], state, state.clone(), none.clone()


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cum_q: torch.Tensor,
    cum_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    state: torch.Tensor,
    offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v."""
    _check_flash(q, k, v, dropout_p)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = back(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    return dq, *(x.unflatten(1, (-1, repeat)).sum(2) if repeat > 1 else x for x in (dk, dv))


def _check_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> None:
    require(q.dtype in HALF and q.dtype == k.dtype == v.dtype, f"flash attention in {q.dtype}: only fp16 and bf16")
    require(all(x.stride(-1) == 1 for x in (q, k, v)), "flash attention: the last dimension must be contiguous")
    require(dropout_p == 0.0, "flash attention with dropout as an operator is not simulated")


TABLE: dict[str, Any] = {
    "mm": _mm,
    "_scaled_mm": _scaled_mm,
    "_grouped_mm": _grouped_mm,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}


# ---------------------------------------------------------------------------------------------------- attention

_plain = F.scaled_dot_product_attention


def choose(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, enable_gqa: bool = False
) -> str:
    """Which program a GPU of architecture 9.0 would run."""
    for x in (q, k, v, attn_mask):
        if x is not None and x.device != q.device:
            raise MixedDevices(f"attention of tensors on {q.device} and {x.device} at {place()}")
    allowed = set(torch._C._get_flash_sdp_enabled() * [SDPBackend.FLASH_ATTENTION])
    width = q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] <= 256
    dense = all(x.stride(-1) == 1 for x in (q, k, v))
    if allowed and q.dtype in HALF and attn_mask is None and width and dense:
        return "flash"
    if torch._C._get_mem_efficient_sdp_enabled() and q.shape[1] == k.shape[1] and dense:
        return "efficient"
    require(torch._C._get_math_sdp_enabled(), f"No available kernel. q {tuple(q.shape)} {q.dtype}")
    return "math"


class Fused(torch.autograd.Function):
    """A program of one launch forward and one backward; its gradient is that of the same formula."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], name: str, *given: torch.Tensor | None) -> torch.Tensor:
        index = next(x.device.index for x in given if x is not None)
        ctx.options, ctx.name, ctx.index, ctx.state = options, name, index, default(index).get_state()
        ctx.save_for_backward(*given)
        RECORD.launch(f"{name} attention")
        return launch(lambda *inner: _with(options, *inner), given, index, draws=options["dropout_p"] > 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Again forward, with the same random numbers, then torch's own backward pass on the CPU."""
        RECORD.launch(f"{ctx.name} attention backward")
        wants = ctx.needs_input_grad[2:]

        def back(grad: torch.Tensor, *inner: torch.Tensor | None) -> list[torch.Tensor]:
            before = default(ctx.index).get_state()
            default(ctx.index).set_state(ctx.state)
            with torch.enable_grad(), drawing_from(None, ctx.index):
                pairs = [(None if x is None else x.detach(), want) for x, want in zip(inner, wants, strict=True)]
                wanted = [x.requires_grad_() for x, want in pairs if want and x is not None]
                out = _with(ctx.options, *(x for x, _ in pairs))
            default(ctx.index).set_state(before)
            return [x.contiguous() for x in torch.autograd.grad(out, wanted, grad)]

        found = iter(launch(back, (grads[0], *ctx.saved_tensors), ctx.index))
        return None, None, *(next(found) if want else None for want in wants)


def _with(options: dict[str, Any], q: Any, k: Any, v: Any, table: Any = None) -> torch.Tensor:
    return _plain(q, k, v, attn_mask=table, **options)


def launch(call: Any, given: Any, index: int, draws: bool = False) -> Any:
    """Run `call` on the memory inside of `given`, on a tape if there is one; wrap what it returns."""
    inner = [x.inner if isinstance(x, CudaTensor) else x for x in given]

    def compute() -> Any:
        with drawing_from(None, index, draws):
            return call(*inner)

    tape = capturing()
    out = compute() if tape is None else tape.run(compute, [x for x in inner if x is not None], [])
    return [CudaTensor(x, index) for x in out] if isinstance(out, list) else CudaTensor(out, index)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, on a GPU by the program that `choose` names."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not any(isinstance(x, CudaTensor) for x in (query, key, value, attn_mask)):
        return _plain(query, key, value, attn_mask=attn_mask, **options)
    name = choose(query, key, value, attn_mask, enable_gqa)
    detail = f"{str(query.dtype)[6:]}, {'a table' if attn_mask is not None else 'no table'}, width {query.shape[-1]}"
    RECORD.choice(f"attention {name}: {detail}")
    return Fused.apply(options, name, query, key, value, attn_mask)
