"""The optimizer by two kernels is the optimizer by torch: weights, state, norms, decisions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.errors import NumericsError
from minimegatron.kernels import build, operators, ops
from minimegatron.kernels import optimizer as kernel
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.clip import grad_stats
from minimegatron.optim.optimizer import MixedPrecisionOptimizer

pytestmark = pytest.mark.skipif(build.compiler("emulated") is None, reason="no g++ or clang++")
SETTINGS = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, adam_beta2=0.95, log_num_zeros_in_grad=True)


class Model(nn.Module):
    """A matrix that decays, biases that do not, in two dtypes; one of them now and then without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        make = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator))  # noqa: E731
        self.a, self.late = make(33, 65), make(7)
        self.low = nn.Parameter(make(70_000).detach().bfloat16())


def optimizer_of(kernels: str) -> tuple[Model, MixedPrecisionOptimizer]:
    model = Model()
    for name, p in model.named_parameters():
        p.main_grad = torch.zeros(p.shape) if name != "late" else None
    return model, build_optimizer(SETTINGS, model, Mesh.serial(), kernels=kernels)


def step(model: Model, optimizer: MixedPrecisionOptimizer, number: int):
    generator = torch.Generator().manual_seed(number)
    for p in (model.a, model.low):
        p.main_grad.copy_(torch.randn(p.shape, generator=generator) * 10.0**-number)
        p.main_grad.view(-1)[:3] = 0.0
    model.late.grad = torch.randn(7, generator=generator) if number != 1 else None
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-2 / number
    return optimizer.step()


def test_steps_state_and_a_change_of_who_computes(monkeypatch):
    used = set()
    real = operators.run
    monkeypatch.setattr(kernel, "run", lambda file, name, *a: (used.add(name), real(file, name, *a))[1])
    plain, fused = optimizer_of("torch"), optimizer_of("emulated")
    for number in range(1, 5):
        versions = [p._version for p in fused[0].parameters()]
        want, got = step(*plain, number), step(*fused, number)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-12) and got.num_zeros == want.num_zeros
        moved = [p._version > v for p, v in zip(fused[0].parameters(), versions, strict=True)]
        assert moved == [True, number != 1, True], "autograd is told of writes that it has not seen"
        if number == 3:  # the state goes from one to the other and back
            states = [optimizer.state_dict() for _, optimizer in (plain, fused)]
            states = [
                {**s, "state": {n: {k: v.clone() for k, v in t.items()} for n, t in s["state"].items()}} for s in states
            ]
            for (_, optimizer), state in zip((fused, plain), states, strict=True):
                optimizer.load_state_dict(state)
    assert used == {"mm_adam", "mm_squared_norm"}
    for (name, p), q in zip(plain[0].named_parameters(), fused[0].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-2 if name == "low" else 1e-6, atol=1e-6)
    theirs, ours = (o.state_dict()["state"] for _, o in (plain, fused))
    assert theirs["late"]["step"] == ours["late"]["step"] == 3 and ours["a"]["step"] == 4
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_gradient_is_named_and_nothing_moves(bad):
    model, optimizer = optimizer_of("emulated")
    model.a.main_grad.fill_(1.0)
    model.low.main_grad.fill_(1.0)[69_999] = bad
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NumericsError, match="1 gradient tensors.*(?s:.*)low"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_statistics_count_what_this_rank_counts():
    grads = [(torch.randn(n, generator=torch.Generator().manual_seed(n)), n % 2 == 0) for n in (5, 70_000, 131_072, 8)]
    grads.append((grads[0][0].bfloat16(), True))
    norms = partial(ops.squared_norms, tables=kernel.Tables(), kernels="emulated")
    for _ in range(2):  # the second time with the tables of the first
        got = grad_stats(grads, Mesh.serial().world, squared_norms=norms)
        want = grad_stats(grads, Mesh.serial().world)
        torch.testing.assert_close(got.norm, want.norm, rtol=1e-12, atol=0.0)
        grads[1][0].mul_(3.0)
    grads[0][0][2], grads[2][0][-1] = torch.nan, torch.inf
    assert grad_stats(grads, Mesh.serial().world, squared_norms=norms).to_host()[2] == 2
    grads = grads[:2]  # other tensors: other tables
    assert grad_stats(grads, Mesh.serial().world, squared_norms=norms).nonfinite == 1
