"""Lab 05's checks: what the judge takes for right, beside the package and beside all choices counted out."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from labkit import warm
from labkit.answers import GivenAnswer
from labkit.exercises import Draw
from labkit.ranks import pool as workers
from minimegatron.layers.moe.dispatch import dispatch_bytes
from minimegatron.layers.moe.router import Routing, balance_scores, balancing_loss, best, choose
from minimegatron.layers.moe.router import limit as package_limit
from minimegatron.models.families import family_config
from tests.course.marked import LABS
from tests.labkit.cells import COURSE
from tests.thorough import mostly_thorough

LAB = LABS["05_moe_ep"].lab


def config_of(**fields):
    return family_config("mixtral", num_layers=1, num_attention_heads=1, vocab_size=8, **{"hidden_size": 8, **fields})


def drawn(exercise, seed):
    """The inputs of the first hidden case."""
    return next(case.inputs(Draw(seed)) for case in LAB[exercise].cases if case.hidden)


@pytest.mark.parametrize("seed", range(3))
def test_what_the_judge_takes_for_right_is_what_the_package_does(seed):
    i = drawn("bytes_per_layer", seed)
    for way in ("alltoall", "allgather"):
        config = config_of(
            hidden_size=i["h"], num_experts=i["experts"], moe_router_topk=i["k"], moe_token_dispatcher_type=way
        )
        counted = dispatch_bytes(config, i["tokens"], i["ep"], 1, i["element_size"])
        rows = sum(n for what, n in counted.items() if way == "allgather" or what == "all_to_all/ep")
        assert LAB["bytes_per_layer"].reference(**i)[way] == rows * (i["ep"] - 1) / i["ep"]

    i = drawn("balance", seed)
    logits = i["logits"].double().requires_grad_()
    config = config_of(num_experts=logits.shape[1], moe_router_topk=i["k"])
    scores, chosen = balance_scores(logits, config)
    loss = i["coeff"] * balancing_loss(scores, chosen.sum(0, keepdim=True) / len(chosen), i["k"]) / len(chosen)
    loss.backward()
    right = LAB["balance"].reference(**i)
    assert right["loss"] == pytest.approx(loss.item())
    torch.testing.assert_close(right["gradient"], logits.grad.float())

    i = drawn("expert_bias", seed)
    config = config_of(
        num_experts=i["scores"].shape[1],
        moe_router_topk=i["k"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    weights, chosen = choose(torch.logit(i["scores"].double()), config, i["bias"].double())
    torch.testing.assert_close(
        LAB["expert_bias"].reference(**i)["probs"], torch.zeros_like(i["scores"]).scatter(1, chosen, weights.float())
    )

    i = drawn("machines", seed)
    groups = {"moe_router_num_groups": i["machines"], "moe_router_group_topk": i["most"]}
    config = config_of(num_experts=i["experts"], moe_router_topk=i["k"], **groups)
    chosen = torch.zeros(i["scores"].shape, dtype=torch.bool).scatter(1, best(i["scores"], config), True)
    assert torch.equal(LAB["machines"].reference(**i)["near's map"], chosen)

    i = drawn("limit", seed)
    kept = package_limit(Routing(i["probs"], i["map"]), i["capacity"], config_of(num_experts=i["map"].shape[1]))
    assert all(map(torch.equal, LAB["limit"].reference(**i).values(), kept))


def test_the_expected_drops_are_the_mean_over_all_choices():
    tokens, experts, k, capacity = 4, 4, 2, 3
    every = list(itertools.product(itertools.combinations(range(experts), k), repeat=tokens))
    over = sum(max(0, sum(e in one for one in chosen) - capacity) for chosen in every for e in range(experts))
    right = LAB["expected_drops"].reference(tokens, experts, k, 1.5)
    assert right == {"capacity": capacity, "dropped": pytest.approx(over / len(every) / (tokens * k))}


def test_the_machines_of_a_token_are_the_mean_over_all_choices():
    every = [len({e // 3 for e in one}) for one in itertools.combinations(range(9), 4)]
    right = LAB["machines"].reference(9, 4, 3, torch.zeros(1, 9), 2, tied=True)
    assert right["machines_of_a_token's result"] == pytest.approx(sum(every) / len(every))


@pytest.mark.parametrize(
    ("exercise", "old", "new", "part"),
    [
        ("expert_bias", "bias + rate", "bias - 3 * rate", "bias is wrong"),
        ("balance", "return paid.sum()", "return paid.mean()", "loss is wrong"),
    ],
)
def test_a_hidden_case_says_which_part_is_wrong(nursery, exercise, old, new, part):
    lab = LABS["05_moe_ep"]
    verdict = lab.check(nursery, exercise, lab.solutions[exercise].replace(old, new))
    hidden = [row for row, case in zip(verdict.rows, LAB[exercise].cases, strict=True) if case.hidden]
    assert hidden and all(part in row.note for row in hidden), verdict


RANKS_CELL = re.compile(r"^# %%[^\n]*\n# %%ranks \d+ [^\n]*--name (\w+)[^\n]*\n(.*?)(?=^# %%)", re.S | re.M)
DISPATCHES = [one for one in LABS["05_moe_ep"].answers if one.right and one.exercise == "dispatch"]


@pytest.mark.parametrize(
    "answer",
    mostly_thorough(DISPATCHES, lambda one: "batch_isend_irecv" in one.name),
    ids=lambda one: one.name,
)
def test_the_bytes_of_any_right_dispatch_are_those_predicted(answer: GivenAnswer, tmp_path) -> None:
    """However the counts are exchanged: by an all-to-all, by messages from rank to rank, as Python's objects."""
    cells = dict(RANKS_CELL.findall((COURSE / "05_moe_ep" / "lab.py").read_text()))
    (tmp_path / "exercises").mkdir()
    for name, source in {**LABS["05_moe_ep"].solutions, "dispatch": answer.source}.items():
        (tmp_path / "exercises" / f"{name}.py").write_text(source)
    for name in ("ways", "moe_parts", "volume"):
        (tmp_path / f"{name}.py").write_text(cells[name])
    rows, *_ = workers.shared_pool(4).run(warm.run_cell, str(tmp_path / "volume.py"), timeout=60)
    for ep in (2, 4):
        right = LAB["bytes_per_layer"].reference(tokens=256, h=64, experts=8, k=2, ep=ep, element_size=4)
        assert rows["all-to-all, yours", ep] == rows["all-to-all, the package's", ep] == right["alltoall"]
        assert rows["all-gather, the package's", ep] == right["allgather"]
