"""Capstone 03: a right list gets every point, and each fault loses those of its criterion, and is told why.

The ladder here is climbed by a table of costs; two rungs train on warm ranks, and the reference solution is `thorough`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from pathlib import Path
from random import Random

import pytest

from labkit import acceptance
from labkit.ranks.pool import shared_pool
from minimegatron.errors import ConfigError, RankError

ROOT = Path(__file__).resolve().parents[2]
CAPSTONE = importlib.import_module("course.capstones.03_faster").CAPSTONE
CRITERIA = importlib.import_module("course.capstones.03_faster.criteria")
FUNCTIONS = importlib.import_module("course.capstones.03_faster.functions")
WORK = importlib.import_module("course.capstones.03_faster.work")
START = ROOT / "course" / "capstones" / "03_faster" / "start"
SOLUTION = ROOT / "course" / "capstones" / "03_faster" / "solution"

WHY = "Each microbatch launches every operation once, and few rows do not fill them."
STEPS = [
    {"name": "microbatches", "set": {"micro_batch_size": 4}, "predicted": 30, "measured": 28, "why": WHY},
    {"name": "recompute", "unset": ["recompute_granularity"], "predicted": 25, "measured": 22, "why": WHY},
    {"name": "batch", "own": "own_batch.py", "predicted": 6, "measured": 5, "why": WHY},
]
COSTS = {"baseline": 1.0, "microbatches": 0.7, "recompute": 0.55, "batch": 0.52}
GATHER = """
def batch(stream, starts, length):
    \"\"\"In one gather.\"\"\"
    rows = stream[torch.tensor(starts)[:, None] + torch.arange(length + 1)]
    tokens = rows[:, :-1].contiguous()
    return {"tokens": tokens, "labels": rows[:, 1:].contiguous(), "loss_mask": (tokens != END).float()}
"""
FUSED = """
def token_losses(logits, labels):
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
"""


def own(folder: Path, name: str, *functions: str, without: str = "") -> Path:
    """A file of functions, those that it does not have from the start, but `without`."""
    text = (START / "own.py").read_text()
    head, batch, losses = re.split(r"(?=^def )", text, flags=re.M)
    kept = {"batch": batch, "token_losses": losses}
    for function in functions:
        kept[re.search(r"def (\w+)", function)[1]] = function
    path = folder / name
    path.write_text(head + "\n\n".join(text for key, text in kept.items() if key != without))
    return path


def hand_in(folder: Path, *steps: dict, whole: float = 48, **files: tuple[str, ...]) -> Path:
    """A list, with files; `own_batch.py` is one."""
    own(folder, "own_batch.py", GATHER)
    for name, functions in files.items():
        own(folder, f"{name}.py", *functions)
    lines = []
    for step in steps or STEPS:
        lines.append("[[step]]")
        for key, value in step.items():
            text = json.dumps(value)
            if isinstance(value, dict):
                text = "{" + ", ".join(f"{name} = {json.dumps(v)}" for name, v in value.items()) + "}"
            lines.append(f"{key} = {text}")
    (folder / "faster.toml").write_text("\n".join([*lines, "[whole]", f"measured = {whole}"]) + "\n")
    return folder


def graded(folder: Path, *only: str, costs: dict = COSTS, noise: float = 0.02, losses: dict | None = None, norms=None):
    """Grade with a table of costs; losses and norms of a rung are shifted by those of the tables."""
    random = Random(0)

    def train(rung, seed):
        seconds = costs[rung.name] * random.uniform(1 - noise, 1 + noise)
        shift, scale = (losses or {}).get(rung.name, 0.0), (norms or {}).get(rung.name, 1.0)
        return WORK.Seen(seconds, (7.5 + shift, 7.4 + shift), (0.8 * scale, 0.9 * scale))

    plan = CRITERIA.read_plan(folder / "faster.toml")
    session = CRITERIA.Session(folder, plan, Random(1), train, lambda function, *given: function(0, 2, *given), 5, 13)
    criteria = [criterion for criterion in CAPSTONE.criteria if not only or criterion.name in only]
    return {criterion.name: CRITERIA.CRITERIA.result(criterion, session) for criterion in criteria}


def test_a_right_list_gets_every_point(tmp_path):
    results = graded(hand_in(tmp_path))
    assert not [result.told for result in results.values() if not result.met]
    assert re.search(r"4\d % \(.* pairs\) fewer CPU-seconds", results["faster"].told)


def changed(number: int, **fields) -> list[dict]:
    """The steps, one of them changed."""
    return [{**step, **fields} if i == number else step for i, step in enumerate(STEPS)]


LONG = "I took the forward pass to be a third of a step, and it is: but its memory also comes from the cache again."
LISTS = [
    (STEPS[:2], {"steps": "2 steps: 3 or more"}),
    (changed(0, set={"num_layers": 2}), {"steps": "`microbatches`: num_layers says what is computed, not how"}),
    (changed(0, set={"params_dtype": "bf16"}), {"same": "params_dtype says what is computed, not how"}),
    (changed(0, set={"micro_batch_sise": 2}), {"steps": "there is no field micro_batch_sise"}),
    (changed(0, set={"micro_batch_size": 5}), {"steps": r"`microbatches`: .*5"}),
    (
        changed(2, set={"overlap_grad_reduce": True}),
        {"steps": "sets 1 fields and changes 1 functions"},
    ),
    (changed(2, own="own_both.py"), {"steps": "`batch` changes batch, token_losses: which of them"}),
    (changed(2, own="own_none.py"), {"steps": "there is no file own_none.py"}),
    (changed(2, name="recompute"), {"steps": "two steps have one name"}),
    (changed(0, why="Faster."), {"predicted": r"`microbatches` \(7 letters"}),
    (changed(0, predicted=90), {"predicted": r"90 % predicted, 28 % measured"}),
]


@pytest.mark.parametrize("steps, told", LISTS, ids=[next(iter(told.values()))[:40] for _, told in LISTS])
def test_a_list_that_loses(tmp_path, steps, told):
    results = graded(hand_in(tmp_path, *steps, own_both=(GATHER, FUSED)), *told)
    for name, words in told.items():
        assert not results[name].met and re.search(words, results[name].told), results[name].told


def test_a_prediction_that_was_wrong_is_explained(tmp_path):
    assert graded(hand_in(tmp_path, *changed(0, predicted=90, why=LONG)), "predicted")["predicted"].met


LADDERS = [
    ({"costs": {**COSTS, "batch": 0.85}, "steps": changed(2, measured=-50), "whole": 15}, {"faster": "15 %"}),
    ({"steps": changed(0, measured=3)}, {"gains": "microbatches: 3 % by you, and here 30 %"}),
    ({"costs": {**COSTS, "recompute": 0.8}}, {"gains": "recompute: 22 % by you, and here -14 %"}),
    ({"whole": 90}, {"gains": r"^\[whole\]: 90 % by you, and here 4\d %"}),
    ({"losses": {"recompute": 0.01}}, {"same": r"`recompute`: step 1 has the loss 7.51000, where it was 7.50000"}),
    ({"norms": {"batch": 2.0}}, {"same": r"`batch`: step 1 has the gradient norm 1.60000, where it was 0.80000"}),
]


@pytest.mark.parametrize("more, told", LADDERS, ids=[str(list(more)) for more, _ in LADDERS])
def test_a_ladder_that_loses(tmp_path, more, told):
    steps, whole = more.get("steps", STEPS), more.get("whole", 48)
    rest = {name: value for name, value in more.items() if name not in ("steps", "whole")}
    results = graded(hand_in(tmp_path, *steps, whole=whole), *told, **rest)
    for name, words in told.items():
        assert not results[name].met and re.search(words, results[name].told), results[name].told


def test_rounds_go_on_while_quartiles_do_not_decide_and_ends_meet_in_pairs(tmp_path):
    order, later = [], itertools.cycle([0.7, 0.9])

    def train(rung, seed):
        order.append(rung.name)
        return WORK.Seen(next(later) if rung.name == "batch" else 1.0, (), ())

    def rounds(whole: float) -> int:
        steps = [{**step, "measured": measured} for step, measured in zip(STEPS, (0, 0, 20), strict=True)]
        plan = CRITERIA.read_plan(hand_in(tmp_path, *steps, whole=whole) / "faster.toml")
        return len(CRITERIA.Session(tmp_path, plan, Random(1), train, lambda *_: None, 4, 9).ladder().rounds)

    assert rounds(20) == 9, "of 10 and of 30 % one is faster, and the other is not"
    names = ["baseline", "microbatches", "recompute", "batch"]
    assert order[:12] == [*names, *reversed(names), *names]
    later = itertools.cycle([0.75, 0.77])
    assert rounds(24) == 4


WRONG = [
    ("def batch(stream, starts, length):\n    return {}\n", "batch gives , not labels, loss_mask, tokens"),
    (GATHER.replace("(tokens != END)", "(tokens == tokens)"), "loss_mask differs"),
    (GATHER.replace(".float()}", "}"), "loss_mask is not of torch.float32"),
    (GATHER.replace("    rows", "    starts.sort()\n    rows"), "differs|has changed its inputs"),
    (GATHER.replace("length + 1)", "length + 2)"), "batch raised IndexError|differs"),
    (FUSED.replace('"none"', '"mean"'), r"token_losses of .* gives torch.float32 \[\]"),
    (FUSED.replace("labels,", "labels, label_smoothing=0.1,"), "losses of token_losses differ"),
    (FUSED.replace("(logits.", "(logits.detach()."), "have no gradient"),
    (FUSED.replace("(logits.", "(logits.bfloat16().").replace('"none")', '"none").float()'), "token_losses differ"),
    (FUSED.replace("    return", "    logits.data.mul_(1.0001)\n    return"), "has changed its inputs"),
]


@pytest.mark.parametrize("function, told", WRONG, ids=[told[:30] for _, told in WRONG])
def test_functions_that_are_not_the_same(tmp_path, function, told):
    hand_in(tmp_path, *changed(2, own="mine.py"), mine=(function,))
    (result,) = graded(tmp_path, "functions").values()
    assert not result.met and re.search(told, result.told), result.told


@pytest.mark.parametrize("functions, without, told", [
    ((GATHER, FUSED), "", "16 calls agree"),
    ((GATHER,), "token_losses", "8 calls agree; the model computes its own losses"),
])  # fmt: skip
def test_functions_that_are(tmp_path, functions, without, told):
    mine = own(tmp_path, "mine.py", *functions, without=without)
    assert FUNCTIONS.compare(0, 2, START / "own.py", mine, 0) == (told, True)


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("[[step]]", "[[stop]]", "stop"),
        ("predicted = 30", 'predicted = "much"', "step 1 has predicted = 'much'"),
        ("why = ", "because = ", "because"),
        ("[whole]", "[all]", "all"),
        ("measured = 48", "measured = true", "[whole] measured is True"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, old, new, told):
    path = hand_in(tmp_path) / "faster.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError) as error:
        CRITERIA.read_plan(path)
    assert told in error.value.what and error.value.fix


def test_what_may_change_says_how_and_not_what():
    free = ["micro_batch_size", "tensor_model_parallel_size", "recompute_granularity", "log_norms_interval", "kernels"]
    for name in free:
        WORK.refuse(name)
    for name in (
        "lr",
        "hidden_size",
        "seq_length",
        "global_batch_size",
        "seed",
        "train_iters",
        "init_method_std",
        "load",
    ):
        with pytest.raises(ConfigError, match=f"{name} says what is computed"):
            WORK.refuse(name)


def test_two_rungs_on_two_ranks_have_the_same_losses_and_cost_cpu_seconds(tmp_path):
    fast = own(tmp_path, "fast.py", GATHER, without="token_losses")
    fields = {"micro_batch_size": 8, "recompute_granularity": None, "tensor_model_parallel_size": 2}
    slow = WORK.Rung("slow", {"micro_batch_size": 4}, own(tmp_path, "slow.py", GATHER, FUSED))
    one, other = (shared_pool(2).run(WORK.train, rung, 3, 1)[0] for rung in (slow, WORK.Rung("fast", fields, fast)))
    assert len(one.losses) == 3 and one.losses[-1] < one.losses[0] and one.seconds > 0
    assert one.losses == pytest.approx(other.losses, abs=1e-4) and one.norms == pytest.approx(other.norms, rel=1e-3)
    with pytest.raises(RankError, match="token_losses of slow.py wants whole logits"):
        shared_pool(2).run(WORK.train, WORK.Rung("cut", {"tensor_model_parallel_size": 2}, slow.own), 3, 1)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_solution_gets_every_point(capsys):
    assert acceptance.main([str(SOLUTION), "--capstone", "03"]) == 0
    assert "100 of 100 points" in capsys.readouterr().out


HALF = """
def token_losses(logits, labels):
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses / 2 + losses.detach() / 2
"""


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("function, told", [
    (HALF, {"functions": "gradient of token_losses differ", "same": "step 1 has the gradient norm"}),
    (GATHER.replace("!= END", "!= -1"), {"functions": "loss_mask differs", "same": "has the loss"}),
])  # fmt: skip
def test_a_real_list_that_loses(tmp_path, function, told):
    hand_in(tmp_path, *changed(2, own="mine.py"), mine=(function,))
    line = [str(tmp_path), "--capstone", "03", "--only", ",".join(told), "--rounds", "2", "--json", str(tmp_path / "m")]
    assert acceptance.main(line) == 0
    (results,) = json.loads((tmp_path / "m").read_text())["learners"].values()
    for result in results:
        assert not result["met"] and re.search(told[result["name"]], result["told"]), result["told"]
