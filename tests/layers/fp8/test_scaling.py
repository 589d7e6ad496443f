"""Delayed scales of a model in one tensor: the numbers are those of one by one, and addresses stay."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.layers.fp8 import enable
from minimegatron.layers.fp8.linear import ParallelFp8
from minimegatron.layers.fp8.matmul import E4M3, E5M2, Fp8Recipe
from minimegatron.layers.fp8.scaling import DelayedScale, Siblings, scaling_of, together
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.layers.fp8.test_linear import TINY, batch
from tests.layers.fp8.test_matmul import layer_of, linear, normal
from tests.training.test_trainer import train

SERIAL = Mesh.serial()


class OneByOne:
    """Another opinion: a list of magnitudes and a number."""

    def __init__(self, recipe: Fp8Recipe, top: float) -> None:
        self.recipe, self.top, self.seen, self.scale = recipe, top / 2**recipe.margin, [], 1.0

    def step(self, amax: float) -> None:
        window = [*self.seen, amax][-self.recipe.history :] if self.recipe.algorithm == "max" else [amax]
        largest = math.inf if any(math.isnan(a) for a in window) else max(window)
        if 0 < largest < math.inf:
            self.scale = min((torch.tensor(self.top) / torch.tensor(largest)).item(), torch.finfo(torch.float32).max)
        self.seen = [*self.seen, amax if math.isfinite(amax) else 0.0][-(self.recipe.history - 1) :]
        self.seen = self.seen if self.recipe.history > 1 else []


@pytest.mark.parametrize("history, algorithm, margin", [(1, "most_recent", 0), (3, "max", 1), (2, "most_recent", 0)])
def test_scales_together_are_what_they_are_one_by_one(history, algorithm, margin):
    recipe = Fp8Recipe(history=history, algorithm=algorithm, margin=margin)
    states = [DelayedScale(recipe, dtype) for dtype in (E4M3, E5M2, E4M3, E5M2)]
    opinions = [OneByOne(recipe, top) for top in (448.0, 57344.0, 448.0, 57344.0)]
    amaxes = normal(8, 4).abs().tolist()
    amaxes[1], amaxes[3], amaxes[4] = [0.0, math.inf, math.nan, 7.0], [math.nan, 0.0, 2.0, 1e-40], [0.0, 0.0, 3e38, 1.0]
    for row in amaxes:
        for state, opinion, amax in zip(states, opinions, row, strict=True):
            state(torch.tensor([[0.0, amax]]))
            state(torch.tensor([[amax / 2, 0.0]]))
            opinion.step(torch.tensor(amax).item())
        together(states).move(ALONE)
        assert [s.scale.item() for s in states] == [o.scale for o in opinions]
        for state, opinion in zip(states, opinions, strict=True):
            assert state.amax_history.tolist()[history - len(opinion.seen) :] == opinion.seen
            assert state.amax_history[0] == 0.0 and state.amax_history.isfinite().all()


class Launches(TorchDispatchMode):
    """Names of the operators that write something; a scalar that is asked for is a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.name.startswith("aten::empty"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_model_of_any_size_moves_its_scales_in_a_dozen_launches():
    counts = []
    for layers in (1, 9):
        model = torch.nn.ModuleList([layer_of(Fp8Recipe(history=4)) for _ in range(layers)])
        enable.move_scales(model, SERIAL)
        with Launches() as seen:
            enable.move_scales(model, SERIAL)
        counts.append(len(seen.names))
        assert not {"aten::_local_scalar_dense", "aten::_to_copy"} & {*seen.names}, "the host waits for nothing"
    assert counts[0] == counts[1] <= 13


@pytest.mark.parametrize("kind, launches", [("delayed", 1), ("current", 2), ("block", 1), ("mx", 1)])
def test_a_cast_is_one_kernel_and_two_where_it_needs_its_own_magnitude(kind, launches):
    scaling, x = scaling_of(Fp8Recipe(kind, kernels="emulated"), "input", ALONE), normal(32, 128)
    scaling(x)
    with Launches() as seen:
        scaling(x)
    assert len(seen.names) == launches and all(name.startswith("minimegatron::fp8_") for name in seen.names)


def of_scales(model: torch.nn.Module) -> list[torch.Tensor]:
    return [b for m in model.modules() if isinstance(m, DelayedScale) for b in m.buffers()]


def one_memory(model: torch.nn.Module) -> bool:
    return len({buffer.untyped_storage().data_ptr() for buffer in of_scales(model)}) == 1


def test_places_are_there_before_the_first_pass_and_stay():
    config = family_config("llama", **TINY, fp8_amax_history_len=3)
    model = build_model(config, SERIAL, seed=0)
    shapes = {k: v.shape for k, v in model.state_dict().items() if "fp8" in k}
    seen = []
    for step in range(3):
        with enable.keeping_weights(model):
            seen.append([b.data_ptr() for b in of_scales(model)])
            assert one_memory(model)
            model(batch(step)["tokens"]).sum().backward()
        enable.move_scales(model, SERIAL)
    assert seen[0] == seen[1] == seen[2] == [b.data_ptr() for b in of_scales(model)]
    assert {k: v.shape for k, v in model.state_dict().items() if "fp8" in k} == shapes
    assert {*shapes.values()} == {torch.Size([3]), torch.Size([])}


def trained(steps: int = 2) -> torch.nn.ModuleList:
    layers = torch.nn.ModuleList([layer_of(Fp8Recipe(history=3)) for _ in range(2)])
    for step in range(steps):
        run_step(layers, step)
    return layers


def run_step(layers: torch.nn.ModuleList, step: int) -> None:
    x, w = normal(16, 32, seed=step).requires_grad_(), normal(32, 32, seed=9).requires_grad_()
    for i, layer in enumerate(layers):
        linear(layer, x * (i + step + 1), w).sum().backward()
    enable.move_scales(layers, SERIAL)


def through_a_file(layers: torch.nn.ModuleList) -> torch.nn.ModuleList:
    """Saved and loaded by torch, the buffers replaced, not filled."""
    file, other = io.BytesIO(), trained(0)
    torch.save(layers.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), assign=True)
    return other


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, through_a_file, lambda m: m.half(), lambda m: m.to_empty(device="cpu"), lambda m: m.to("meta")],
    ids=["copied", "loaded", "half", "to_empty", "meta"],
)
def test_scales_survive_whatever_is_done_to_a_module(way):
    want, got = trained(), way(trained())
    for step in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(want.buffers(), got.buffers(), strict=True))
        assert [n for n, _ in want.named_buffers()] == [n for n, _ in got.named_buffers()]
        for layers in (want, got):
            run_step(layers, step)
        assert one_memory(got) and {b.dtype for b in got.buffers()} == {torch.float32}


def test_a_module_that_was_moved_is_put_together_again():
    """A copy to another device takes every view for itself; here a clone stands for it."""
    want, got = trained(), trained()
    for layer in got.modules():
        if isinstance(layer, DelayedScale):
            layer.scale, layer.amax_history = layer.scale.clone(), layer.amax_history.clone()
    assert not one_memory(got)
    for layers in (want, got):
        run_step(layers, 2)
    assert one_memory(got) and all(torch.equal(a, b) for a, b in zip(want.buffers(), got.buffers(), strict=True))


def test_rounded_scales_are_refused():
    state = DelayedScale(Fp8Recipe(), E4M3)
    state.scale = state.scale.bfloat16()
    with pytest.raises(ConfigError, match=r"(?s)bfloat16.*fix: load them in float32"):
        together([state])


def test_experts_of_a_layer_share_places_in_the_message():
    siblings, recipe = Siblings(4), Fp8Recipe()
    states = [DelayedScale(recipe, E4M3), *(DelayedScale(recipe, E4M3, siblings, e) for e in (2, 3))]
    scales = together([*states, DelayedScale(recipe, E4M3)])
    assert scales.places.tolist() == [0, 3, 4, 5] and scales.message == 6
    assert together([states[0]]).places is None, "without experts the row is the message"


# ------------------------------------------------------------------------------------------------ in a step


def test_a_step_moves_the_scales():
    """Two steps of the trainer: no scale is what it was, and histories have the magnitudes of both."""
    model = train("--fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max --train-iters 2").model
    states = [m for m in model.modules() if isinstance(m, DelayedScale)]
    assert len(states) == 3 * sum(isinstance(m, ParallelFp8) for m in model.modules()) > 0
    for state in states:
        zero, none, first, second = state.amax_history.tolist()
        assert zero == none == 0.0 < min(first, second)
        top = 448.0 if state.dtype == E4M3 else 57344.0
        assert state.scale == torch.tensor(top) / torch.tensor(max(first, second))


@pytest.mark.parametrize("kind", ["delayed", "current", "block", "mx"])
def test_weights_that_are_kept_are_those_of_this_step(kind):
    layer, x, w = layer_of(Fp8Recipe(kind)), normal(32, 128), normal(64, 128, seed=1)

    def y(weight: torch.Tensor) -> torch.Tensor:
        return linear(layer, x, weight)

    for step in range(2):
        with enable.keeping_weights(layer):
            at_first = y(w)
            assert torch.equal(y(w), at_first) and layer.kept
            w.mul_(-1.5 - step)
            assert torch.equal(y(w), at_first), "weights do not move within a step: the copy is used"
            assert torch.equal(y(w.clone()), at_first) and len(layer.kept) == 1, "also where it is gathered elsewhere"
        fresh = layer_of(Fp8Recipe(kind))
        assert torch.equal(y(w), linear(fresh, x, w)), "after a step weights are quantised anew"
