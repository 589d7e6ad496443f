"""RMSNorm and LayerNorm kernels against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from minimegatron.errors import ConfigError
from minimegatron.kernels import launch, norm, reference
from tests.kernels.compare import DTYPES, SIZES, both, close, misaligned, random

EPS = 1e-5


def case(rows, n, dtype, centred, residual):
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

    return apply(norm), apply(reference), tensors


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_forward_and_backward(n, centred):
    for dtype in DTYPES if n <= 33 else (torch.float64, torch.bfloat16):
        for residual in (False, True):
            kernel, wanted, tensors = case(7 if n < 1000 else 2, n, dtype, centred, residual)
            if n == 1 and centred:  # y = beta, and dx is the difference of equal numbers
                tensors = [t.double() for t in tensors]
            got, want = both(kernel, wanted, tensors)
            close(got, want, tensors[0].dtype, factor=2 if residual else 1)


@pytest.mark.parametrize("n", [64, 8192, 40000])
def test_rows_in_registers_in_several_packs_and_beyond(n):
    kernel, wanted, tensors = case(2, n, torch.bfloat16, True, True)
    close(*both(kernel, wanted, tensors), torch.bfloat16, factor=2)


@pytest.mark.parametrize("order", [1, 5])
def test_the_order_of_threads_changes_nothing(order):
    kernel, _, tensors = case(5, 96, torch.float32, True, True)
    want = both(kernel, kernel, tensors)[0]
    library = launch.library("norm", "emulated")
    library.order(order)
    try:
        got = both(kernel, kernel, tensors)[0]
    finally:
        library.order(0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strides_and_misaligned_memory():
    x, gamma = random(6, 128), random(64, seed=1)
    want = reference.norm(x[:, ::2].double(), gamma.double(), None, EPS)
    for view in (x[:, ::2], misaligned(x[:, ::2].contiguous()), x[:, ::2].t().contiguous().t()):
        close([norm.norm(view, misaligned(gamma), None, EPS)], [want], torch.float32)


@pytest.mark.parametrize("parts", [1, 64, 65, 75])
def test_any_number_of_blocks_gives_the_same_sums(monkeypatch, parts):
    """On a GPU there are hundreds, and more threads share a column then."""
    monkeypatch.setattr(norm.checks, "parts_for", lambda rows, device, resident: parts)
    kernel, wanted, tensors = case(75, 33, torch.float64, True, True)
    close(*both(kernel, wanted, tensors), torch.float64)


@pytest.mark.parametrize("n", [1, 33, 64, 2048, 40000])
def test_how_many_blocks_a_multiprocessor_holds_is_asked(n):
    for dtype in DTYPES:
        assert norm.resident(n, dtype, True, torch.device("cpu")) == 2, "what the emulator answers"


def test_nothing_is_written_outside():
    room = torch.full((3 * 33 + 64,), 7.0)
    library = launch.library("norm", "emulated")
    y = room[32 : 32 + 99]
    x, gamma, rstd = random(3, 33), random(33), torch.empty(3)
    library.call("mm_norm_forward", x, None, gamma, None, x, y, None, rstd, 3, 33, EPS, 0)
    assert (room[:32] == 7).all() and (room[32 + 99 :] == 7).all() and not (y == 7).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_in_its_row(bad):
    kernel, wanted, tensors = case(4, 33, torch.float32, True, False)
    tensors[0][1, 5] = bad
    got, want = both(kernel, wanted, tensors)
    assert got[0][1].isnan().all() and want[0][1].isnan().all()
    assert not got[0][[0, 2, 3]].isnan().any() and not got[1][[0, 2, 3]].isnan().any()


def test_empty():
    gamma = random(8).requires_grad_()
    for shape in ((0, 8), (3, 0, 8)):
        x = torch.empty(shape, requires_grad=True)
        y = norm.norm(x, gamma, None, EPS)
        dx, dgamma = torch.autograd.grad(y.sum(), [x, gamma])
        assert y.shape == dx.shape == x.shape and torch.equal(dgamma, torch.zeros(8))


def test_shapes_and_dtypes_are_refused_before_the_launch():
    x = random(4, 8)
    for args, message in [
        ((x, random(7), None, EPS), r"gamma is \(7,\), expected \(8,\)"),
        ((x, random(8, dtype=torch.bfloat16), None, EPS), "gamma is torch.bfloat16"),
        ((x.int(), random(8), None, EPS), "x is torch.int32"),
        ((torch.tensor(1.0), random(8), None, EPS), "expected"),
    ]:
        with pytest.raises(ConfigError, match=message):
            norm.norm(*args)


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_gradcheck(centred):
    kernel, _, tensors = case(3, 6, torch.float64, centred, True)
    assert gradcheck(kernel, [t.requires_grad_() for t in tensors])


def test_opcheck():
    x, gamma, beta = (t.requires_grad_() for t in (random(3, 8), random(8, seed=1), random(8, seed=2)))
    torch.library.opcheck(torch.ops.minimegatron.norm, (x, gamma, None, EPS))
    torch.library.opcheck(torch.ops.minimegatron.add_norm, (x, random(3, 8, seed=3), gamma, beta, EPS))
