"""What all operators have in common: schemas and fake tensors, refusals, any order of threads, torch.compile."""

from __future__ import annotations

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.errors import ConfigError
from minimegatron.kernels import (
    chunk_scan,  # noqa: F401
    cross_entropy,
    flash,
    fp8,  # noqa: F401  defines operators that are looked up by name
    operators,
    permute,
    pointwise,
    rope,
)
from tests.kernels.compare import both, random
from tests.thorough import SLOW

SLOTS = torch.randperm(24, generator=torch.Generator().manual_seed(0))
PLACES = permute.inverse(SLOTS, 12, 2)
IDS = torch.tensor([0, 4, 2])
ONE, ANGLES = torch.ones(()), random(2, 1, 1, 2)


def grad(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(*shape, seed=seed).requires_grad_()


@pytest.mark.parametrize(("name", "arguments"), [
    ("norm", (grad(3, 8), grad(8), None, 1e-5)),
    ("add_norm", (grad(3, 8), random(3, 8, seed=3), grad(8), grad(8, seed=2), 1e-5)),
    ("swiglu", (grad(2, 2, 3, 8),)),
    ("bias_gelu", (grad(2, 2, 3, 8), grad(8), True)),
    ("scaled_softmax", (grad(2, 2, 3, 8), 0.5, torch.zeros(1, 1, 3, 8).bool(), True)),
    ("rope", (grad(2, 2, 3, 8), ANGLES.cos(), ANGLES.sin(), False, False)),
    ("heads", (grad(2, 2, 1, 3, 4), ANGLES.cos(), ANGLES.sin(), True, True)),
    ("cross_entropy", (grad(3, 5), IDS)),
    ("cross_entropy_overwrite", (random(3, 5), IDS, random(3), random(3, seed=1), 0, 5, 1.0, 0.0, True)),
    ("cross_entropy_statistics", (random(3, 5), IDS, 0, 5)),
    ("permute", (grad(12, 3), SLOTS, PLACES)),
    ("unpermute", (grad(24, 3), SLOTS, PLACES, grad(12, 2))),
    ("flash_attention", (grad(1, 2, 3, 2), grad(1, 1, 4, 2), grad(1, 1, 4, 2), 0.6, True)),
    ("flash_attention", (grad(1, 2, 3, 2), grad(1, 1, 4, 2), grad(1, 1, 4, 2), 0.6, True, True)),
    ("chunk_scan", (grad(2, 1, 3, 3), grad(2, 2, 3), grad(2, 3, 2, 4), torch.zeros(2, 3, dtype=torch.int64))),
    ("chunk_scan", (grad(2, 1, 3, 3), grad(2, 2, 3), grad(2, 3, 2, 4))),
    ("fp8_cast", (random(3, 5), ONE, 0.0, torch.zeros(()), False, True)),
    ("fp8_cast", (random(3, 5), torch.ones(3), 448.0, None, False, True)),
    ("fp8_amax", (random(3, 5),)),
    ("fp8_cast_tiles", (random(3, 5), 1, 4, 0, True)),
    ("fp8_dequantise", (torch.zeros(3, 5, dtype=torch.uint8), torch.ones(3, 2), 1, 4, True)),
])  # fmt: skip
def test_schema_fake_tensors_and_autograd(name, arguments):
    kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.minimegatron, name), arguments, test_utils=kinds)


X, HEADS = random(4, 8), random(2, 2, 3, 4)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: pointwise.norm(X, random(7), None, 1e-5), r"gamma is \(7,\), expected \(8,\)"),
    (lambda: pointwise.norm(X, random(8).bfloat16(), None, 1e-5), "gamma is torch.bfloat16"),
    (lambda: pointwise.norm(X.int(), random(8), None, 1e-5), "x is torch.int32"),
    (lambda: pointwise.norm(torch.tensor(1.0), random(8), None, 1e-5), "expected"),
    (lambda: pointwise.swiglu(random(3, 5)), "side by side"),
    (lambda: pointwise.bias_gelu(random(3, 5), random(4)), r"bias is \(4,\), expected \(5,\)"),
    (lambda: pointwise.scaled_softmax(random(3, 5), 1.0), r"\[b, a, q, k\]"),
    (lambda: pointwise.scaled_softmax(HEADS, 1.0, random(2, 1, 3, 4)), "mask is torch.float32"),
    (lambda: pointwise.scaled_softmax(HEADS, 1.0, torch.zeros(3, 1, 3, 4).bool()), "for scores"),
    (lambda: rope.rope(HEADS, random(2, 1, 1, 3), random(2, 1, 1, 3)), "3 angles for 4 channels"),
    (lambda: rope.rope(HEADS, random(3, 1, 1, 2), random(3, 1, 1, 2)), r"cos is \(3, 1, 1, 2\)"),
    (lambda: rope.native_heads(random(2, 2, 1, 2, 4), ANGLES, ANGLES, False), "groups, a/g"),
    (lambda: rope.rope(HEADS.bfloat16(), ANGLES.bfloat16(), ANGLES), "give angles"),
    (lambda: cross_entropy.cross_entropy(random(2, 5), IDS), r"target is \(3,\)"),
    (lambda: cross_entropy.cross_entropy(random(3, 5), IDS.int()), "int32"),
    (lambda: cross_entropy.statistics(random(3, 5), IDS, 0, 6), "6 of 5"),
    (lambda: permute.permute(random(13, 4), SLOTS, PLACES), "x has 13 rows"),
    (lambda: permute.permute(random(12, 4), SLOTS.int(), PLACES), "int64 slots"),
    (lambda: permute.unpermute(random(24, 4), SLOTS, PLACES, random(12, 3)), "probs is"),
    (lambda: permute.unpermute(random(24, 4), SLOTS, PLACES, random(12, 2).bfloat16()), "probs are"),
    (lambda: flash.flash_attention(random(1, 3, 4, 8), *[random(1, 2, 4, 8)] * 2, 1.0), "2 key heads for 3"),
    (lambda: flash.flash_attention(*[random(1, 1, 4, 129)] * 3, 1.0), "heads of 129"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_launch(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


class Names(TorchDispatchMode):
    """The operators of this package that are called while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func._schema.name.split("::")[1]] if "minimegatron" in func._schema.name else []
        return func(*args, **(kwargs or {}))


def test_a_kernel_for_cpus_is_a_torch_operator_to_whoever_looks():
    tensors = [grad(5, 8), grad(5, 8, seed=1), grad(8, seed=2)]

    def results():
        y, h = pointwise.add_norm(*tensors, None, 1e-5, native=True)
        return y, h, *torch.autograd.grad([y, h], tensors, [random(5, 8, seed=3), random(5, 8, seed=4)])

    alone = results()
    with Names() as seen:
        watched = results()
    assert seen.names == ["add_norm", "norm_backward"]
    assert all(torch.equal(x, y) for x, y in zip(alone, watched, strict=True))
    (of_sum,) = torch.autograd.grad(pointwise.add_norm(*tensors, None, 1e-5, native=True)[1].sum(), tensors[:1])
    assert torch.equal(of_sum, torch.ones(5, 8)), "the sum alone is used"


def test_a_second_derivative_that_no_kernel_has_is_refused():
    x, gamma = grad(5, 8), grad(8)
    (dx,) = torch.autograd.grad(pointwise.norm(x, gamma, None, 1e-5, native=True).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_backward"):
        dx.sum().backward()


@pytest.mark.parametrize(("file", "kernel", "shapes"), [
    ("norm", lambda x, r, g, b: pointwise.add_norm(x, r, g, b, 1e-5), [(5, 96), (5, 96), (96,), (96,)]),
    ("softmax", lambda x: pointwise.scaled_softmax(x, 0.5, None, True), [(2, 1, 5, 96)]),
    ("activation", pointwise.bias_gelu, [(6, 70), (70,)]),
    ("flash_attention", lambda *qkv: flash.flash_attention(*qkv, 0.3)[0], [(1, 2, 40, 8), *[(1, 1, 40, 8)] * 2]),
])  # fmt: skip
def test_the_order_of_threads_changes_nothing(file, kernel, shapes):
    tensors, results = [random(*shape, seed=i) for i, shape in enumerate(shapes)], []
    library = operators.library(file, "emulated")
    for order in (1, 9, 0):
        library.order(order)
        results.append(both(kernel, kernel, tensors)[0])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_reduction_over_rows_takes_one_wave_of_blocks(monkeypatch):
    h100 = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    gpu = torch.device("cuda", 0)
    assert operators.parts_for(1 << 20, gpu, 5) == 660 and operators.parts_for(100, gpu, 5) == 100
    assert operators.parts_for(1 << 20, gpu) == 264 and operators.parts_for(1 << 20, torch.device("cpu"), 5) == 4


def test_a_driver_older_than_the_compiler_is_said():
    library = operators.library("norm", "emulated")
    real, library.emulated = library.emulated, False
    try:
        error = str(library._error("mm_norm_forward", 35, ()))
    finally:
        library.emulated = real
    assert "the driver is older than the compiler" in error and "CUDA_HOME" in error


# --------------------------------------------------------------------------------------------------- torch.compile


def block(x, r, gamma, w, cos, sin, slots, places, target):
    """A little of everything, in the order of a layer."""
    y, h = pointwise.add_norm(x, r, gamma, None, 1e-5)
    heads = rope.rope(y.view(6, 2, 2, 16), cos, sin)
    q = heads.permute(1, 2, 0, 3)
    z, _ = flash.flash_attention(q, q, q, 0.25)
    z = z + pointwise.scaled_softmax(q @ q.transpose(-1, -2), 0.25, None, True) @ q
    z = pointwise.swiglu(pointwise.bias_gelu(z.permute(2, 0, 1, 3).reshape(12, 32) @ w, w[0], True))
    z = pointwise.norm(h.view(12, 32), gamma, gamma, 1e-5) + z
    z = permute.unpermute(permute.permute(z, slots, places), slots, places)
    return cross_entropy.cross_entropy(z, target)


@SLOW
def test_one_graph_without_breaks_and_the_same_numbers():
    slots = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    rest = (random(6, 1, 1, 8), random(6, 1, 1, 8, seed=1), slots, permute.inverse(slots, 12, 2), torch.arange(12))
    inputs = [random(6, 2, 32, seed=2), random(6, 2, 32, seed=3), random(32, seed=4), random(32, 64, seed=5, scale=0.2)]
    graphs = []

    def backend(graph, examples):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend=backend)):
        given = [t.clone().requires_grad_() for t in inputs]
        loss = run(*given, *rest)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    (seen,) = graphs
    mine = {name for name in seen if "minimegatron" in name}
    assert len(mine) >= 9, sorted(seen)
