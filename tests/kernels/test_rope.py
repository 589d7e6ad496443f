"""RoPE, and heads out of a packed projection: kernels, and their twins for CPUs, against the reference in fp64."""

from __future__ import annotations

import functools

import pytest
import torch

from minimegatron.kernels import operators, reference, rope
from tests.kernels.compare import DTYPES, both, close, random

FEW = (torch.float64, torch.bfloat16)
NATIVE = functools.partial(rope.rope, native=True)
BY = pytest.mark.parametrize("by", [rope.rope, NATIVE], ids=["emulated", "native"])


@BY
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d, r", [(2, 1), (32, 16), (31, 8), (64, 8), (33, 16), (128, 64)])
def test_rope(by, d, r, interleaved):
    for dtype in (DTYPES if by is rope.rope else operators.CPU_DTYPES) if d == 32 else FEW:
        for batch in (1, 2):
            wide = torch.promote_types(dtype, torch.float32)
            angle = random(5, batch, 1, r, seed=3, scale=2.0)
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            kernel = lambda x, c=cos, s=sin: by(x, c, s, interleaved)  # noqa: E731
            wanted = lambda x, c=cos, s=sin: reference.rope(x, c.double(), s.double(), interleaved)  # noqa: E731
            close(*both(kernel, wanted, [random(5, 2, 3, d, dtype=dtype)]), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_heads_out_of_a_packed_projection(dtype):
    """The kernel for CPUs, and RoPE's kernel on views, against views that the reference has turned."""
    for batch, groups, shared, d, r, angles_batch, interleaved in [
        (2, 3, 2, 40, 20, 1, False), (3, 1, 4, 16, 5, 3, False), (2, 2, 1, 12, 4, 2, True), (1, 2, 3, 128, 64, 1, True),
    ]:  # fmt: skip
        packed, angles = random(5, batch, groups, shared + 2, d, dtype=dtype), random(5, angles_batch, 1, r, seed=1)
        cos, sin = angles.cos().to(operators.accumulator(dtype)), angles.sin().to(operators.accumulator(dtype))

        def wanted(x, s=shared, cos=cos, sin=sin, kind=interleaved):
            turn = lambda y: reference.rope(y, cos.to(y.dtype), sin.to(y.dtype), kind)  # noqa: E731
            return turn(x[:, :, :, :s].flatten(2, 3)), turn(x[:, :, :, s]), x[:, :, :, s + 1]

        for by in (rope.native_heads, rope.turned_heads):
            close(*both(lambda x, c=cos, s=sin, k=interleaved, f=by: f(x, c, s, k), wanted, [packed]), dtype)
        one = packed.clone().requires_grad_()
        rope.native_heads(one, cos, sin, interleaved)[2].sum().backward()
        assert torch.equal(one.grad, torch.zeros_like(one).index_fill_(3, torch.tensor([shared + 1]), 1.0))


@BY
def test_rope_reads_a_view_into_packed_heads(by):
    packed, angle = random(4, 2, 6, 16, dtype=torch.float64), random(4, 1, 1, 8, dtype=torch.float64)
    for view in (packed[:, :, 2:4], packed.transpose(0, 1)[:, :, ::2].transpose(0, 1), packed.flip(-1)):
        want = reference.rope(view, angle.cos(), angle.sin())
        close([by(view, angle.cos(), angle.sin())], [want], torch.float64)


@BY
def test_rope_of_tokens_two_billion_elements_apart(by):
    """Memory that is not touched is not used."""
    far, angle = 2**31 + 8, random(2, 1, 1, 4)
    room = torch.empty(far + 8, dtype=torch.bfloat16)
    room[:8], room[far:] = random(8), random(8, seed=1)
    x = room.as_strided((2, 1, 1, 8), (far, 8, 8, 1))
    close([by(x, angle.cos(), angle.sin())], [reference.rope(x, angle.cos(), angle.sin())], torch.bfloat16)


@BY
def test_rope_of_nothing(by):
    angles = torch.empty(0, 1, 1, 2)
    assert by(torch.empty(0, 2, 3, 4), angles, angles).shape == (0, 2, 3, 4)
