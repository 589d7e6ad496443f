"""Norms, softmax, SwiGLU, bias-GeLU: kernels, and their twins for CPUs, against the reference in fp64."""

from __future__ import annotations

import functools
import types

import pytest
import torch

from minimegatron.kernels import cross_entropy, operators, pointwise, reference
from tests.kernels.compare import DTYPES, SIZES, both, close, misaligned, random

FEW = (torch.float64, torch.bfloat16)
TWINS = ("norm", "add_norm", "swiglu")
NATIVE = types.SimpleNamespace(**{name: functools.partial(getattr(pointwise, name), native=True) for name in TWINS})
BY = pytest.mark.parametrize("by", [pointwise, NATIVE], ids=["emulated", "native"])


def dtypes_of(by):
    return [dtype for dtype in DTYPES if by is pointwise or dtype in operators.CPU_DTYPES]


NONE, CAUSAL, MASKED, BOTH = "none", "causal", "masked", "both"


def softmax_case(kind, b, a, q, k, dtype, scale=0.5):
    """(kernel, reference, scores); the mask of sample 0 hides row 1 wholly."""
    mask = None
    if kind in (MASKED, BOTH):
        mask = torch.rand(b, 1, q, k, generator=torch.Generator().manual_seed(4)) < 0.3
        mask[0, :, min(1, q - 1)] = True
    causal = kind in (CAUSAL, BOTH)
    return (
        lambda x: pointwise.scaled_softmax(x, scale, mask, causal),
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
        got = pointwise.scaled_softmax(x, 1.0, mask)
        close([got], [reference.scaled_softmax(x.double(), 1.0, mask)], torch.float32)


def test_softmax_hidden_keys_take_nothing_and_large_scores_do_not_overflow():
    x = random(1, 1, 4, 8, scale=1e4).requires_grad_()
    y = pointwise.scaled_softmax(x, 3.0, None, True)
    (dx,) = torch.autograd.grad(y, x, random(1, 1, 4, 8))
    hidden = torch.ones(4, 8, dtype=torch.bool).triu(5)
    assert y.isfinite().all() and torch.allclose(y.sum(-1), torch.ones(1, 1, 4))
    assert (y[0, 0][hidden] == 0).all() and (dx[0, 0][hidden] == 0).all()


def test_softmax_numbers_that_are_not_finite():
    x = random(1, 1, 3, 33)
    x[0, 0, 1, 4] = torch.nan
    y = pointwise.scaled_softmax(x, 1.0)
    assert y[0, 0, 1].isnan().all() and y[0, 0, [0, 2]].isfinite().all()
    x[0, 0, 1, 4] = -torch.inf
    close([pointwise.scaled_softmax(x, 1.0)], [x.double().softmax(-1)], torch.float32)


@BY
@pytest.mark.parametrize("f", SIZES)
def test_swiglu(by, f):
    for dtype in dtypes_of(by) if f == 33 else FEW:
        x = random(3, 2 * f, dtype=dtype, scale=2.0)
        close(*both(by.swiglu, reference.swiglu, [x]), dtype)


@pytest.mark.parametrize("f", SIZES)
@pytest.mark.parametrize("approximate", [False, True], ids=["erf", "tanh"])
def test_bias_gelu(f, approximate):
    for dtype in DTYPES if f == 33 else FEW:
        tensors = [random(9 if f < 100 else 2, f, dtype=dtype, scale=2.0), random(f, dtype=dtype, seed=1)]
        kernel, wanted = (lambda x, b, m=m: m.bias_gelu(x, b, approximate) for m in (pointwise, reference))
        close(*both(kernel, wanted, tensors), dtype)


@BY
def test_activations_of_extreme_numbers(by):
    x = torch.tensor([[-1e4, 1e4, -80.0, 0.0, 2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    y = by.swiglu(x)
    assert y.tolist()[0][1:] == [2e4, pytest.approx(-160 * 1.8e-35, abs=1e-30), 0.0]
    assert abs(y[0, 0].item()) < 1e-30
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    assert by.swiglu(torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])).isnan().all()


def test_gelu_of_extreme_numbers():
    x = torch.tensor([[-1e4, 1e4, -80.0, 0.0, 2.0, 2.0, 2.0, 2.0]])
    g = pointwise.bias_gelu(x, torch.zeros(8))
    assert g[0, 0] == 0 and g[0, 1] == 1e4


@BY
def test_strides_and_misaligned_memory(by):
    x = random(4, 64)
    for view in (x[:, ::2], misaligned(x), x.t()):
        close([by.swiglu(view)], [reference.swiglu(view.double())], torch.float32)


def test_softmax_of_strides_and_misaligned_memory():
    scores = random(2, 2, 4, 32)
    close([pointwise.scaled_softmax(scores.mT, 1.0)], [scores.mT.double().softmax(-1)], torch.float32)
    close([pointwise.scaled_softmax(misaligned(scores), 1.0)], [scores.double().softmax(-1)], torch.float32)


@BY
def test_empty(by):
    assert by.swiglu(torch.empty(0, 8)).shape == (0, 4)
    assert pointwise.scaled_softmax(torch.empty(0, 2, 3, 4), 1.0).shape == (0, 2, 3, 4)
    x, b = torch.empty(0, 4, requires_grad=True), random(4).requires_grad_()
    dx, db = torch.autograd.grad(pointwise.bias_gelu(x, b).sum(), [x, b])
    assert dx.shape == (0, 4) and torch.equal(db, torch.zeros(4))


# ----------------------------------------------------------------------------------------------------------- norms

EPS = 1e-5


def norm_case(rows, n, dtype, centred, residual, by=pointwise):
    """(kernel, reference, tensors) of one kind of norm."""
    shapes = [(rows, n), *([(rows, n)] if residual else []), (n,), *([(n,)] if centred else [])]
    tensors = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]

    def apply(module):
        def run(x, *rest):
            rest = list(rest)
            r = rest.pop(0) if residual else None
            gamma, beta = rest[0], rest[1] if centred else None
            return module.norm(x, gamma, beta, EPS) if r is None else module.add_norm(x, r, gamma, beta, EPS)

        return run

    return apply(by), apply(reference), tensors


@BY
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norm(by, n, centred):
    for dtype in dtypes_of(by) if n <= 33 else (torch.float64, torch.bfloat16):
        for residual in (False, True):
            kernel, wanted, tensors = norm_case(7 if n < 1000 else 2, n, dtype, centred, residual, by)
            if n == 1 and centred:  # y = beta, and dx is the difference of equal numbers
                tensors = [t.double() for t in tensors]
            got, want = both(kernel, wanted, tensors)
            close(got, want, tensors[0].dtype, factor=2 if residual else 1)


@pytest.mark.parametrize("n", [64, 8192, 40000])
def test_norm_rows_in_registers_in_several_packs_and_beyond(n):
    kernel, wanted, tensors = norm_case(2, n, torch.bfloat16, True, True)
    close(*both(kernel, wanted, tensors), torch.bfloat16, factor=2)


@BY
def test_norm_of_strides_and_misaligned_memory(by):
    x, gamma = random(6, 128), random(64, seed=1)
    want = reference.norm(x[:, ::2].double(), gamma.double(), None, EPS)
    for view in (x[:, ::2], misaligned(x[:, ::2].contiguous()), x[:, ::2].t().contiguous().t()):
        close([by.norm(view, misaligned(gamma), None, EPS)], [want], torch.float32)


@pytest.mark.parametrize("parts", [1, 64, 65, 75])
def test_norm_any_number_of_blocks_gives_the_same_sums(monkeypatch, parts):
    """On a GPU there are hundreds, and more threads share a column then."""
    monkeypatch.setattr(pointwise, "parts_for", lambda rows, device, resident: parts)
    kernel, wanted, tensors = norm_case(75, 33, torch.float64, True, True)
    close(*both(kernel, wanted, tensors), torch.float64)


@pytest.mark.parametrize("n", [1, 33, 64, 2048, 40000])
def test_how_many_blocks_a_multiprocessor_holds_is_asked(n):
    for dtype in DTYPES:
        assert pointwise.resident(n, dtype, True, torch.device("cpu")) == 2, "what the emulator answers"


def test_threads_share_rows_and_change_no_bit():
    """Sums over rows are cut into as many parts on any number of threads."""
    x, gamma, ids, found = random(3000, 512), random(512, seed=1), torch.arange(3000), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            z, g = x.clone().requires_grad_(), gamma.clone().requires_grad_()
            y = NATIVE.swiglu(NATIVE.norm(z, g, None, EPS))
            found.append([y, *torch.autograd.grad(y, [z, g], random(3000, 256, seed=2))])
            found[-1] += cross_entropy.statistics(x, ids % 512, 0, 512, True)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("target", ["emulated", "cpu"])
def test_norm_nothing_is_written_outside(target):
    room = torch.full((3 * 33 + 64,), 7.0)
    library = operators.library("norm", target)
    y = room[32 : 32 + 99]
    x, gamma, rstd = random(3, 33), random(33), torch.empty(3)
    library.call("mm_norm_forward", x, None, gamma, None, x, y, None, rstd, 3, 33, EPS, 0)
    assert (room[:32] == 7).all() and (room[32 + 99 :] == 7).all() and not (y == 7).any()


@BY
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_norm_a_number_that_is_not_finite_stays_in_its_row(by, bad):
    kernel, wanted, tensors = norm_case(4, 33, torch.float32, True, False, by)
    tensors[0][1, 5] = bad
    got, want = both(kernel, wanted, tensors)
    assert got[0][1].isnan().all() and want[0][1].isnan().all()
    assert not got[0][[0, 2, 3]].isnan().any() and not got[1][[0, 2, 3]].isnan().any()


@BY
def test_norm_of_large_numbers_overflows_nowhere_but_in_its_result(by):
    """Weights of a run that diverges: its gradients are wrong much later if they are NaN."""
    kernel, wanted, tensors = norm_case(3, 33, torch.float32, True, True, by)
    tensors[0] *= 1e18
    got, want = both(kernel, wanted, tensors)
    close([got[0], *got[2:]], [want[0], *want[2:]], torch.float32, factor=2)


def test_a_layer_norm_whose_variance_overflows_is_not_a_number():
    """Zeros in its place would hide from the trainer that a run diverges."""
    for n in (8, 33, 512):
        assert NATIVE.norm(random(2, n) * 1e30, torch.ones(n), torch.ones(n), EPS).isnan().all()


@BY
def test_norm_of_nothing(by):
    gamma = random(8).requires_grad_()
    for shape in ((0, 8), (3, 0, 8)):
        x = torch.empty(shape, requires_grad=True)
        y = by.norm(x, gamma, None, EPS)
        dx, dgamma = torch.autograd.grad(y.sum(), [x, gamma])
        assert y.shape == dx.shape == x.shape and torch.equal(dgamma, torch.zeros(8))
