"""Softmax, SwiGLU, bias-GeLU, RoPE: kernels against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from minimegatron.errors import ConfigError
from minimegatron.kernels import activation, launch, reference, rope, softmax
from tests.kernels.compare import DTYPES, SIZES, both, close, misaligned, random

FEW = (torch.float64, torch.bfloat16)
NONE, CAUSAL, MASKED, BOTH = "none", "causal", "masked", "both"


def softmax_case(kind, b, a, q, k, dtype, scale=0.5):
    """(kernel, reference, scores); the mask of sample 0 hides row 1 wholly."""
    mask = None
    if kind in (MASKED, BOTH):
        mask = torch.rand(b, 1, q, k, generator=torch.Generator().manual_seed(4)) < 0.3
        mask[0, :, min(1, q - 1)] = True
    causal = kind in (CAUSAL, BOTH)
    return (
        lambda x: softmax.scaled_softmax(x, scale, mask, causal),
        lambda x: reference.scaled_softmax(x, scale, mask, causal),
        random(b, a, q, k, dtype=dtype),
    )


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("kind", [NONE, CAUSAL, MASKED, BOTH])
def test_softmax(kind, k):
    for dtype in DTYPES if k == 33 else FEW:
        kernel, wanted, x = softmax_case(kind, 2, 2 if k < 100 else 1, 3, k, dtype)
        close(*both(kernel, wanted, [x]), dtype)


@pytest.mark.parametrize("shape", [(1, 2, 40, 40), (1, 1, 3, 12000), (1, 1, 20, 8), (1, 1, 7, 96)])
def test_softmax_shapes_that_take_other_paths(shape):
    """Square, beyond the registers of a block, more queries than keys (some see nothing), packs cut by the diagonal."""
    for dtype in FEW:
        kernel, wanted, x = softmax_case(CAUSAL, *shape, dtype)
        close(*both(kernel, wanted, [x]), dtype)


def test_softmax_sees_the_mask_of_its_sample_and_head():
    x = random(2, 3, 4, 8)
    for shape in ((2, 1, 4, 8), (1, 1, 4, 8), (2, 3, 4, 8)):
        mask = torch.rand(shape) < 0.4
        close([softmax.scaled_softmax(x, 1.0, mask)], [reference.scaled_softmax(x.double(), 1.0, mask)], torch.float32)


def test_softmax_hidden_keys_take_nothing_and_large_scores_do_not_overflow():
    x = random(1, 1, 4, 8, scale=1e4).requires_grad_()
    y = softmax.scaled_softmax(x, 3.0, None, True)
    (dx,) = torch.autograd.grad(y, x, random(1, 1, 4, 8))
    hidden = torch.ones(4, 8, dtype=torch.bool).triu(5)
    assert y.isfinite().all() and torch.allclose(y.sum(-1), torch.ones(1, 1, 4))
    assert (y[0, 0][hidden] == 0).all() and (dx[0, 0][hidden] == 0).all()


def test_softmax_numbers_that_are_not_finite():
    x = random(1, 1, 3, 33)
    x[0, 0, 1, 4] = torch.nan
    y = softmax.scaled_softmax(x, 1.0)
    assert y[0, 0, 1].isnan().all() and y[0, 0, [0, 2]].isfinite().all()
    x[0, 0, 1, 4] = -torch.inf
    close([softmax.scaled_softmax(x, 1.0)], [x.double().softmax(-1)], torch.float32)


@pytest.mark.parametrize("f", SIZES)
def test_swiglu(f):
    for dtype in DTYPES if f == 33 else FEW:
        x = random(3, 2 * f, dtype=dtype, scale=2.0)
        close(*both(activation.swiglu, reference.swiglu, [x]), dtype)


@pytest.mark.parametrize("f", SIZES)
@pytest.mark.parametrize("approximate", [False, True], ids=["erf", "tanh"])
def test_bias_gelu(f, approximate):
    for dtype in DTYPES if f == 33 else FEW:
        tensors = [random(9 if f < 100 else 2, f, dtype=dtype, scale=2.0), random(f, dtype=dtype, seed=1)]
        kernel, wanted = (lambda x, b, m=m: m.bias_gelu(x, b, approximate) for m in (activation, reference))
        close(*both(kernel, wanted, tensors), dtype)


def test_activations_of_extreme_numbers():
    x = torch.tensor([[-1e4, 1e4, -80.0, 0.0, 2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    y = activation.swiglu(x)
    assert y.tolist()[0][1:] == [2e4, pytest.approx(-160 * 1.8e-35, abs=1e-30), 0.0] and y[0, 0] == 0
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    g = activation.bias_gelu(x, torch.zeros(8))
    assert g[0, 0] == 0 and g[0, 1] == 1e4


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d, r", [(2, 1), (32, 16), (31, 8), (64, 8), (33, 16), (128, 64)])
def test_rope(d, r, interleaved):
    for dtype in DTYPES if d == 32 else FEW:
        for batch in (1, 2):
            wide = torch.promote_types(dtype, torch.float32)
            angle = random(5, batch, 1, r, seed=3, scale=2.0)
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            kernel = lambda x, c=cos, s=sin: rope.rope(x, c, s, interleaved)  # noqa: E731
            wanted = lambda x, c=cos, s=sin: reference.rope(x, c.double(), s.double(), interleaved)  # noqa: E731
            close(*both(kernel, wanted, [random(5, 2, 3, d, dtype=dtype)]), dtype)


def test_rope_reads_a_view_into_packed_heads():
    packed, angle = random(4, 2, 6, 16, dtype=torch.float64), random(4, 1, 1, 8, dtype=torch.float64)
    for view in (packed[:, :, 2:4], packed.transpose(0, 1)[:, :, ::2].transpose(0, 1), packed.flip(-1)):
        want = reference.rope(view, angle.cos(), angle.sin())
        close([rope.rope(view, angle.cos(), angle.sin())], [want], torch.float64)


def test_rope_of_tokens_two_billion_elements_apart():
    """Memory that is not touched is not used."""
    far, angle = 2**31 + 8, random(2, 1, 1, 4)
    room = torch.empty(far + 8, dtype=torch.bfloat16)
    room[:8], room[far:] = random(8), random(8, seed=1)
    x = room.as_strided((2, 1, 1, 8), (far, 8, 8, 1))
    close([rope.rope(x, angle.cos(), angle.sin())], [reference.rope(x, angle.cos(), angle.sin())], torch.bfloat16)


def test_strides_and_misaligned_memory():
    x = random(4, 64)
    for view in (x[:, ::2], misaligned(x), x.t()):
        close([activation.swiglu(view)], [reference.swiglu(view.double())], torch.float32)
    scores = random(2, 2, 4, 32)
    close([softmax.scaled_softmax(scores.mT, 1.0)], [scores.mT.double().softmax(-1)], torch.float32)
    close([softmax.scaled_softmax(misaligned(scores), 1.0)], [scores.double().softmax(-1)], torch.float32)


def test_empty():
    assert activation.swiglu(torch.empty(0, 8)).shape == (0, 4)
    assert softmax.scaled_softmax(torch.empty(0, 2, 3, 4), 1.0).shape == (0, 2, 3, 4)
    assert rope.rope(torch.empty(0, 2, 3, 4), torch.empty(0, 1, 1, 2), torch.empty(0, 1, 1, 2)).shape == (0, 2, 3, 4)
    x, b = torch.empty(0, 4, requires_grad=True), random(4).requires_grad_()
    dx, db = torch.autograd.grad(activation.bias_gelu(x, b).sum(), [x, b])
    assert dx.shape == (0, 4) and torch.equal(db, torch.zeros(4))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: activation.swiglu(random(3, 5)), "side by side"),
        (lambda: activation.bias_gelu(random(3, 5), random(4)), r"bias is \(4,\), expected \(5,\)"),
        (lambda: softmax.scaled_softmax(random(3, 5), 1.0), r"\[b, a, q, k\]"),
        (lambda: softmax.scaled_softmax(random(2, 2, 3, 5), 1.0, random(2, 1, 3, 5)), "mask is torch.float32"),
        (lambda: softmax.scaled_softmax(random(2, 2, 3, 5), 1.0, torch.zeros(3, 1, 3, 5).bool()), "for scores"),
        (lambda: rope.rope(random(2, 2, 3, 4), random(2, 1, 1, 3), random(2, 1, 1, 3)), "3 angles for 4 channels"),
        (lambda: rope.rope(random(2, 2, 3, 4), random(3, 1, 1, 2), random(3, 1, 1, 2)), r"cos is \(3, 1, 1, 2\)"),
        (
            lambda: rope.rope(random(2, 2, 3, 4).bfloat16(), random(2, 1, 1, 2).bfloat16(), random(2, 1, 1, 2)),
            "give angles",
        ),
    ],
)
def test_wrong_shapes_are_refused_before_the_launch(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_gradcheck():
    cos, sin = random(3, 1, 1, 2, dtype=torch.float64), random(3, 1, 1, 2, dtype=torch.float64, seed=1)
    wide = {"dtype": torch.float64}
    for function, tensors in [
        (activation.swiglu, [random(2, 6, **wide)]),
        (activation.bias_gelu, [random(2, 3, **wide), random(3, **wide)]),
        (lambda x: softmax.scaled_softmax(x, 0.7, None, True), [random(1, 1, 3, 4, **wide)]),
        (lambda x: rope.rope(x, cos, sin, True), [random(3, 2, 1, 5, **wide)]),
    ]:
        assert gradcheck(function, [t.requires_grad_() for t in tensors])


def test_opcheck():
    ops, x = torch.ops.minimegatron, random(2, 2, 3, 8).requires_grad_()
    angles = random(2, 1, 1, 2)
    for op, args in [
        (ops.swiglu, (x,)),
        (ops.bias_gelu, (x, random(8).requires_grad_(), True)),
        (ops.scaled_softmax, (x, torch.zeros(1, 1, 3, 8).bool(), 0.5, True)),
        (ops.rope, (x, angles.cos(), angles.sin(), False, False)),
    ]:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("name", ["softmax", "activation"])
def test_the_order_of_threads_changes_nothing(name):
    kernel, tensors = {
        "softmax": (softmax_case(BOTH, 2, 1, 5, 96, torch.float32)[0], [random(2, 1, 5, 96)]),
        "activation": (activation.bias_gelu, [random(6, 70), random(70)]),
    }[name]
    results = []
    for order in (0, 1, 6):
        launch.library(name, "emulated").order(order)
        results.append(both(kernel, kernel, tensors)[0])
    launch.library(name, "emulated").order(0)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
