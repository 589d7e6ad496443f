"""The table of experts: what it adds up, what it suggests, and that every log and the command say the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron import trace
from minimegatron.cli import main
from minimegatron.errors import ConfigError
from minimegatron.layers.moe.balance import LayerLoad
from minimegatron.layers.moe.placement import placement, summarise, table
from minimegatron.training.arguments import parse_args
from tests.mock_data import small_trainer
from tests.training.test_experts import EP2, LINE, scalars


def busiest(ranks: list[list[int]], tokens: list[int]) -> int:
    return max(sum(tokens[e] for e in experts) for experts in ranks)


def best(tokens: list[int], ranks: int) -> int:
    """The least that the busiest rank can have, by trying every order."""
    each = len(tokens) // ranks
    orders = itertools.permutations(tokens)
    return min(max(sum(o[i : i + each]) for i in range(0, len(o), each)) for o in orders)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]))
def test_a_placement_deals_every_expert_once_and_is_nearly_the_best(tokens, ranks):
    found = placement(tokens, ranks)
    assert sorted(itertools.chain(*found)) == list(range(6)) and {len(experts) for experts in found} == {6 // ranks}
    now = [list(range(r * 6 // ranks, (r + 1) * 6 // ranks)) for r in range(ranks)]
    assert busiest(found, tokens) <= busiest(now, tokens)
    assert busiest(found, tokens) <= 4 / 3 * best(tokens, ranks)


def test_two_popular_neighbours_are_parted_and_an_even_load_stays():
    assert [sorted(x) for x in placement([9, 9, 1, 1], 2)] in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert placement([5, 5, 5, 5], 2) == [[0, 1], [2, 3]]
    tokens = [8, 7, 6, 5, 4, 0]  # the greedy deal ends at 17: 8 5 4 | 7 6 0
    assert busiest(placement(tokens, 2), tokens) == best(tokens, 2) == 15


def test_groups_stay_together():
    tokens = [9, 9, 8, 8, 1, 1, 1, 1]
    assert placement(tokens, 2, groups=4) == [[0, 1, 6, 7], [2, 3, 4, 5]] or placement(tokens, 2, groups=4) == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    assert placement(tokens, 4, groups=2) == [[0, 1], [2, 3], [4, 5], [6, 7]], "a rank has half a group: nothing moves"


def test_the_table():
    load = LayerLoad(layer=3, tokens=[300, 300, 0, 200], dropped=80, balancing_loss=0.0, z_loss=0.0)
    (one,) = summarise([[load], [load]], ranks=2)
    assert (one.tokens, one.dropped, one.idle, one.per_rank()) == ([600, 600, 0, 400], 160, 1, [1200, 400])
    text = table([one])
    assert "experts of the last 2 steps: 4 on 2 ranks of ep" in text
    assert "of the last 2 logged steps" in table([one], "logged step")
    row = text.splitlines()[-1].split("  ")
    row = [cell.strip() for cell in row if cell.strip()]
    assert row == ["3", "1.50 x", "1", "10.0 %", "600 200", "1.50 x", "1.25 x", "0 3 | 1 2"]
    with pytest.raises(ConfigError, match="does not divide num_experts"):
        summarise([[load]], ranks=3)


def trained(rank: int, world: int, folder: str) -> str:
    line = f"{LINE} {EP2} --micro-batch-size 2 --moe-expert-capacity-factor 1.0"
    line += f" --log-file {folder}/log.jsonl --tensorboard-dir {folder}/tb"
    with trace.record(rank) as log:
        trainer = small_trainer(parse_args(line.split(), world))
        trainer.train()
        trainer.close()
    marks = log.select("experts", kind="mark")
    return marks[0].note if marks else ""


@pytest.mark.slow
def test_every_log_and_the_command_say_the_same(ranks, tmp_path, capsys):
    said, nothing = ranks(2).run(trained, str(tmp_path), timeout=60)
    assert said.startswith("experts of the last 2 steps: 4 on 2 ranks of ep") and nothing == "", "one rank speaks"
    assert main(["experts", str(tmp_path / "log.jsonl")]) == 0
    assert capsys.readouterr().out.strip() == said
    assert main(["experts", str(tmp_path / "log.jsonl"), "--last", "1", "--expert-model-parallel-size", "4"]) == 0
    assert "experts of the last step: 4 on 4 ranks of ep" in capsys.readouterr().out
    records = [json.loads(row) for row in (tmp_path / "log.jsonl").read_text().splitlines()]
    (written,) = [r for r in records if r["event"] == "experts"]
    steps = [r["experts"][0]["tokens"] for r in records if r["event"] == "train"]
    (layer,) = written["layers"]
    assert layer["tokens"] == [sum(column) for column in zip(*steps, strict=True)]
    tags = scalars(tmp_path / "tb")
    of_rank = [sum(layer["tokens"][:2]), sum(layer["tokens"][2:])]
    assert tags["experts/layer 1/rank imbalance, all steps"] == pytest.approx(2 * max(of_rank) / sum(of_rank))
    last = [sum(steps[-1][:2]), sum(steps[-1][2:])]
    assert tags["experts/layer 1/rank imbalance"] == pytest.approx(2 * max(last) / sum(last))


@pytest.mark.parametrize(
    "lines, words",
    [
        (None, "cannot read"),
        (['{"event": "config"}', "no json"], "line 2 is no record"),
        (['{"event": "train", "experts": [{"layer": 1}]}'], "line 1 is no record"),
        (['{"event": "train", "experts": []}'], "no step of a model with experts"),
    ],
)
def test_what_is_no_log_of_experts_is_refused(lines: Any, words, tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    if lines is not None:
        path.write_text("\n".join(lines))
    assert main(["experts", str(path)]) == 4
    error = capsys.readouterr().err
    assert words in error and "fix:" in error
