"""AdamW and the squared norm over many tensors: against torch's own optimizer and sums in fp64."""

from __future__ import annotations

import pytest
import torch

from minimegatron.errors import ConfigError
from minimegatron.kernels import optimizer, reference
from minimegatron.kernels.optimizer import AdamTable, squared_norm
from tests.kernels.compare import close, misaligned, random

NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SIZES = (1, 31, 33, 1023, 4097)


def tensors(dtype, seed=0):
    return [random(n, dtype=dtype, seed=seed + i) for i, n in enumerate(SIZES)]


@pytest.mark.parametrize("model_dtype", [None, torch.bfloat16, torch.float16])
def test_adam_equals_torch(model_dtype, monkeypatch):
    monkeypatch.setattr(optimizer, "CHUNK", 1024)
    dtype = torch.float64 if model_dtype is None else torch.float32
    main = tensors(dtype)
    model = None if model_dtype is None else [p.to(model_dtype) for p in main]
    twin = [p.clone().requires_grad_() for p in main]
    adam = torch.optim.AdamW(twin, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    grads, m, v = ([torch.zeros_like(p) for p in main] for _ in range(3))
    table = AdamTable(main, grads, m, v, model)
    assert len(table.table) == 3 + 1 + 5
    for step in (1, 2, 3):
        for i, g in enumerate(grads):
            g.copy_(random(g.numel(), dtype=dtype, seed=10 * step + i))
            twin[i].grad = 0.5 * g
        table.step(**NUMBERS, step=step, grad_scale=torch.tensor(0.5, dtype=torch.float64))
        adam.step()
        close(main, twin, dtype)
    close(m, [adam.state[p]["exp_avg"] for p in twin], dtype)
    close(v, [adam.state[p]["exp_avg_sq"] for p in twin], dtype)
    if model is not None:
        assert all(torch.equal(low, p.to(model_dtype)) for low, p in zip(model, main, strict=True))


def test_the_reference_equals_torch():
    p, g = random(50, dtype=torch.float64), random(50, dtype=torch.float64, seed=1)
    twin = p.clone().requires_grad_()
    adam, m, v = torch.optim.AdamW([twin], 1e-2, (0.9, 0.95), 1e-8, 0.1), torch.zeros_like(p), torch.zeros_like(p)
    for step in (1, 2, 3):
        twin.grad = g * step
        adam.step()
        reference.adam_(p, g * step, m, v, **NUMBERS, step=step)
    close([p], [twin], torch.float64)


def test_low_precision_gradients_and_misaligned_memory():
    model = [misaligned(t) for t in tensors(torch.bfloat16)]
    main = [misaligned(t.float()) for t in model]
    grads, m, v = tensors(torch.bfloat16, 5), *([torch.zeros_like(p) for p in main] for _ in range(2))
    want = [p.double() for p in main]
    state = [[torch.zeros_like(p) for p in want] for _ in range(2)]
    AdamTable(main, grads, m, v, model).step(**NUMBERS, step=1)
    for p, g, a, b in zip(want, grads, *state, strict=True):
        reference.adam_(p, g, a, b, **NUMBERS, step=1)
    close(main, want, torch.float32)


def test_nothing_moves_where_a_gradient_is_not_finite():
    p, g = [random(100)], [torch.full((100,), torch.nan)]
    m, v, before = [torch.zeros(100)], [torch.zeros(100)], p[0].clone()
    _, bad = squared_norm(g)
    assert bad.item() == 100
    AdamTable(p, g, m, v).step(**NUMBERS, step=1, nonfinite=bad)
    assert torch.equal(p[0], before) and not m[0].any() and not v[0].any()


def test_squared_norm(monkeypatch):
    monkeypatch.setattr(optimizer, "CHUNK", 1000)
    mixed = [
        *tensors(torch.float32),
        *tensors(torch.bfloat16, 5),
        misaligned(random(77)),
        random(0),
        *tensors(torch.float64),
    ]
    got, want = squared_norm(mixed), reference.squared_norm(mixed)
    assert abs(got[0] / want[0] - 1) < 1e-13 and got[1] == want[1] == 0
    mixed[0][0], mixed[3][5], mixed[7][2] = torch.nan, torch.inf, -torch.inf
    assert squared_norm(mixed)[1] == 3
    assert squared_norm([])[0] == 0
    large = [torch.full((10,), 1e30)]
    assert abs(squared_norm(large)[0].item() / 1e61 - 1) < 1e-6


def test_refused_before_the_launch():
    p = [random(4)]
    for args, message in [
        ((p, [random(5)], p, p), r"grads\[0\] is \(5,\)"),
        ((p, [], p, p), "0 grads for 1"),
        ((p, [random(8)[::2]], p, p), "not contiguous"),
        (([t.bfloat16() for t in p],) + (p,) * 3, "keep main and moments in fp32"),
        ((p, p, [t.double() for t in p], p), "exp_avg is not"),
    ]:
        with pytest.raises(ConfigError, match=message):
            AdamTable(*args)
    with pytest.raises(ConfigError, match="grad_scale"):
        AdamTable(p, p, p, p).step(**NUMBERS, step=1, grad_scale=torch.tensor(1.0))
