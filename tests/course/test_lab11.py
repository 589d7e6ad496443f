"""Lab 11's checks: what the judge takes for right, beside the package's adapters, losses, weights and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from labkit.exercises import Draw
from labkit.ranks.pool import WarmPool
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.inference.block_manager import BlockManager
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.lora import adapted, part_of_rows
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.posttraining.grpo import Answers
from minimegatron.posttraining.policy import PolicyLoss, group_advantages, importance_weights, kl_estimate
from minimegatron.posttraining.preferences import preference_loss
from tests.course.marked import LABS

LAB = LABS["11_post_training"].lab
CONFIG = family_config(
    "llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, lora_rank=4,
    lora_target_modules=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
)  # fmt: skip


def drawn(exercise: str, seed: int) -> list[Any]:
    """The inputs of the hidden cases, one after the other."""
    return [case.inputs(Draw(seed)) for case in LAB[exercise].cases if case.hidden]  # type: ignore[operator]


def right(exercise: str, **inputs: Any) -> Any:
    reference = LAB[exercise].reference
    assert reference is not None
    return reference(**inputs)


def state_of_a_rank(rank: int, world: int) -> tuple[list[dict[str, Any]], int]:
    """The matrices of a model with adapters, and how many of the adapters' parameters this rank holds."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)) if world > 1 else Mesh.serial()
    model, matrices, held = build_model(CONFIG, mesh, 1), [], 0
    of = {id(module.weight): module for module in model.modules() if hasattr(module, "lora")}
    for weight, lora in adapted(model):
        (o, i), module = layout_of(weight).shape, of[id(weight)]
        kind = "column" if isinstance(module, ColumnParallelLinear) else "row"
        matrices.append({"kind": kind, "o": o, "i": i, "parts": int(part_of_rows(layout_of(weight)).max()) + 1})
        held += sum(p.numel() for p in lora.parameters())
    return matrices, held


def test_a_rank_holds_as_many_parameters_of_adapters_as_the_packages(ranks: Callable[..., WarmPool]) -> None:
    matrices, whole = state_of_a_rank(0, 1)
    for of_rank, held in ranks(2).run(state_of_a_rank):
        told = right("adapter_state", matrices=of_rank, r=4, tp=2)
        assert (of_rank, told["whole"], told["rank"]) == (matrices, whole, held)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("way", "loss_type"), [("tokens", "dapo"), ("rows", "grpo"), ("padding", "dr_grpo"), ("microbatches", "bnpo")]
)
def test_a_token_weighs_what_it_weighs_in_the_packages_sums_and_counts(way: str, loss_type: str, seed: int) -> None:
    draw, width, mesh = Draw(seed), 9, Mesh.serial()
    counts = [[draw.integer(0, 8) for _ in range(3)] for _ in range(2)]
    counts[0][0] = 5
    masks = [(torch.arange(width) < torch.tensor(rows)[:, None]).double() for rows in counts]
    losses = [torch.zeros(3, width, dtype=torch.float64, requires_grad=True) for _ in masks]
    sums = [
        Answers(mask, mask.sum(1, keepdim=True).expand(3, width), mesh).aggregate(loss * mask, loss_type, width)
        for loss, mask in zip(losses, masks, strict=True)
    ]
    (sum(one for one, _ in sums) / sum(count for _, count in sums)).backward()
    ours = [[float(row[0]) for row in loss.grad] for loss in losses]  # type: ignore[union-attr]
    told = right("token_weights", counts=counts, width=width, way=way)
    assert torch.allclose(torch.tensor(ours), torch.tensor(told), rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_of_adapters_are_those_of_autograd_on_whole_matrices(seed: int) -> None:
    for ranks in drawn("adapter", seed):
        column = ranks[0]["kind"] == "column"
        x = [r["x"].clone().requires_grad_() for r in ranks]
        a = [r["a"].clone().requires_grad_() for r in ranks]
        b = [r["b"].clone().requires_grad_() for r in ranks]
        if column:
            y = torch.cat([ranks[0]["scale"] * x[0] @ a[0].T @ one.T for one in b], -1)
            y.backward(torch.cat([r["dy"] for r in ranks], -1))
        else:
            u = sum(one @ other.T for one, other in zip(x, a, strict=True))
            y = ranks[0]["scale"] * u @ b[0].T
            y.backward(ranks[0]["dy"])
        for rank, told in enumerate(right("adapter", ranks=ranks)):
            whole = {"y": y.chunk(len(ranks), -1)[rank] if column else y, "dx": x[0 if column else rank].grad,
                     "da": a[0 if column else rank].grad, "db": b[rank if column else 0].grad}  # fmt: skip
            for name, want in whole.items():
                torch.testing.assert_close(told[name], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_of_a_pair_and_its_gradient_are_the_packages(seed: int) -> None:
    for inputs in drawn("dpo", seed):
        logits = inputs["logits"].double().requires_grad_()
        counts, words = inputs["labels"] >= 0, inputs["labels"].clamp(min=0)
        moved = logits.log_softmax(-1).gather(-1, words[..., None])[..., 0] - inputs["reference"].double()
        ratios = moved.masked_fill(~counts, 0.0).sum(1)
        want = preference_loss(ratios[None], counts.sum(1)[None], "sigmoid", inputs["beta"])[0]
        want.backward()
        loss, gradient = right("dpo", **inputs)
        torch.testing.assert_close(loss, want.detach().float())
        torch.testing.assert_close(gradient, logits.grad.float(), rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(("way", "scale"), [("group", "group"), ("centred", "none")])
def test_advantages_of_whole_groups_are_the_packages(way: str, scale: str) -> None:
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    told = right("advantages", rewards=rewards.flatten(), prompts=torch.arange(5).repeat_interleave(4), way=way)
    torch.testing.assert_close(told.view(5, 4), group_advantages(rewards, scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_clipped_loss_and_its_gradient_are_the_packages(seed: int) -> None:
    for inputs in drawn("policy_loss", seed):
        log_probs, mask = inputs["log_probs"].double().requires_grad_(), inputs["mask"].double()

        def mean(values: torch.Tensor, mask: torch.Tensor = mask) -> torch.Tensor:
            return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

        loss = PolicyLoss(inputs["low"], inputs["high"], level=inputs["level"])
        want, _ = loss(log_probs, inputs["old"].double(), inputs["advantages"].double(), mask, mean=mean)
        want.backward(inputs["dy"].double())
        told = right("policy_loss", **inputs)
        torch.testing.assert_close(told["loss"].double(), want.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(told["gradient"].double(), log_probs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_k3_of_every_word_is_the_packages(seed: int) -> None:
    [inputs] = drawn("kl_estimates", seed)
    policy = inputs["policy"].double().requires_grad_()
    log_p, log_ref = policy.log_softmax(0), inputs["reference"].double().log_softmax(0)
    each = kl_estimate(log_p[None], log_ref[None], torch.ones(1, len(policy)))[0]
    (each * log_p.exp().detach()).sum().backward()
    mean, gradient = right("kl_estimates", **inputs)["k3"]
    torch.testing.assert_close(mean.double(), (each * log_p.exp()).sum().detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), policy.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_importance_weights_are_the_packages(seed: int) -> None:
    [inputs] = drawn("importance", seed)
    mask = inputs["mask"]
    gap = (inputs["trainer"] - inputs["engine"]).masked_fill(mask == 0, 0.0)
    mode = f"{inputs['level']}_{inputs['what']}"
    want = importance_weights(gap, mode, inputs["limit"], lambda values: values.sum(1, keepdim=True))
    told = right("importance", **inputs)["weights"]
    torch.testing.assert_close(told, want.expand_as(mask) * mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_old_tokens_are_found_in_the_engines_own_table_of_pages(seed: int) -> None:
    """All prompts of a rollout are looked up before one of them is computed, as they are admitted in one step."""
    [inputs] = drawn("old_tokens", seed)
    size, table, found = inputs["size"], BlockManager(200, inputs["size"]), []
    for prompts in inputs["rollouts"]:
        looked = [table.find(prompt, root=(0, "")) for prompt in prompts]
        found.append([size * len(pages) for pages, _ in looked])
        for prompt, (pages, parent) in zip(prompts, looked, strict=True):
            for page in pages:
                table.share(page)
            mine = [*pages, *(table.take() for _ in range(table.pages_for(len(prompt)) - len(pages)))]
            table.remember(prompt, mine, len(prompt), len(pages), parent)
    assert right("old_tokens", **inputs) == found
