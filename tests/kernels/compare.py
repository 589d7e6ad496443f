"""How kernels are compared: against the reference in fp64, by largest error over largest element."""

from __future__ import annotations

import torch

# Rounding of the result (half a unit in the last place) and of a few fp32 operations on the way.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = (1, 31, 32, 33, 1023, 4097)
DTYPES = tuple(TOLERANCE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, drawn in fp64 so that all dtypes see the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest element of `want` (over 1 where that is smaller than 1e-3)."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    if want.numel() == 0:
        return 0.0
    top = want.double().abs().max()
    difference = (got.double() - want.double()).abs().max()
    return (difference / (top if top > 1e-3 else 1.0)).item()


def close(got, want, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Assert that every pair agrees to the tolerance of the dtype."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        found = error(a, b)
        assert found <= factor * TOLERANCE[dtype], f"tensor {i}: error {found:.2e} in {dtype}, shape {tuple(b.shape)}"


def both(kernel, reference, tensors, seed: int = 9):
    """Outputs and gradients of the kernel, and of the reference in fp64 on the same inputs."""
    results = []
    first = None
    for function, inputs in ((kernel, tensors), (reference, [t.double() for t in tensors])):
        inputs = [t.detach().requires_grad_() for t in inputs]
        out = function(*inputs)
        outs = list(out) if isinstance(out, tuple) else [out]
        first = first or [o.dtype for o in outs]
        weights = [
            random(*o.shape, seed=seed + i).to(d).to(o.dtype) for i, (o, d) in enumerate(zip(outs, first, strict=True))
        ]
        grads = torch.autograd.grad(outs, inputs, weights)
        results.append([*(o.detach() for o in outs), *grads])
    return results


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    view = room[1:].view(x.shape)
    view.copy_(x)
    assert view.data_ptr() % 16
    return view
