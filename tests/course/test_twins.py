"""Beside the serial twin: gradients put together, those that depart, weights as after some training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from course.lab02.twins import departing, equal_shards, gradients, norm, replicas_agree, shake, shards_of, train

from labkit.ranks.pool import WarmPool
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

CONFIG = family_config(
    "gpt2",
    num_layers=1,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=16,
)


def a_step(mesh: Mesh) -> Any:
    model = shake(build_model(CONFIG, mesh, seed=1))
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
    return model


def beside_the_twin(rank: int, world: int, sequence_parallel: bool) -> dict[str, Any]:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sequence_parallel))
    model, serial = a_step(mesh), gradients(a_step(Mesh.serial()))
    grads = gradients(model, mesh)
    with torch.no_grad():
        equal = equal_shards(model, mesh, lambda p: p), equal_shards(model, mesh, torch.zeros_like)
    fc1 = model.decoder.layers["0"].mlp.linear_fc1.weight
    return {
        "off": departing(grads, serial), "norms": (norm(grads), norm(serial)), "agree": replicas_agree(model),
        "equal": equal, "shards": [list(one.shape) for one in shards_of(fc1, mesh, lambda p: p)],
        "plain": [name for name, p in model.named_parameters() if bool((p == p.flatten()[0]).all())],
    }  # fmt: skip


@pytest.mark.thorough
def test_a_model_over_tp_has_the_gradients_of_its_twin(ranks: Callable[..., WarmPool]) -> None:
    for said in ranks(2).run(beside_the_twin, False):
        assert (said["off"], said["agree"]) == ([], True)
        assert said["norms"][0] == pytest.approx(said["norms"][1], rel=1e-5)


def test_partial_gradients_depart_and_replicas_do_not_agree(ranks: Callable[..., WarmPool]) -> None:
    """With sequence parallelism, before anything is summed over tp."""
    for said in ranks(2).run(beside_the_twin, True):
        assert said["off"] and all("layernorm" in n or n.endswith("bias") or "position" in n for n in said["off"])
        assert not said["agree"]
        assert said["norms"][0] != pytest.approx(said["norms"][1], rel=1e-5)


def test_shards_are_compared_matrix_by_matrix(ranks: Callable[..., WarmPool]) -> None:
    for said in ranks(2).run(beside_the_twin, False):
        own, zeros = said["equal"]
        assert own.startswith("0 of ") and zeros == own.replace("0 of", f"{own.split()[-1]} of")
        assert said["shards"] == [[64, 32], [64, 32]]


def test_after_shake_no_bias_is_0_and_no_norm_1(ranks: Callable[..., WarmPool]) -> None:
    assert ranks(2).run(beside_the_twin, False)[0]["plain"] == []


def test_a_gradient_that_is_missing_or_not_a_number_departs() -> None:
    serial = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    assert departing({"a": torch.ones(2), "b": torch.full((2,), torch.nan)}, serial) == ["b", "c"]
    assert departing({name: g * 1.0005 for name, g in serial.items()}, serial) == []
    assert departing({name: g * 1.01 for name, g in serial.items()}, serial) == ["a", "b", "c"]


def test_training_returns_the_loss_of_each_step() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    steps: list[int] = []

    def loss_of(step: int) -> torch.Tensor:
        steps.append(step)
        return (model.weight - 1).square().sum()

    with torch.no_grad():
        model.weight.fill_(0.0)
    curve = train(model, loss_of, steps=4, learning_rate=0.1)
    assert steps == [0, 1, 2, 3] and curve[0] == 1.0 and curve == sorted(curve, reverse=True)
