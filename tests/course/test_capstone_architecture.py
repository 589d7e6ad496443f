"""Capstone 02: an architecture that meets every criterion, and wrong ones that each lose their own, and are told why.

A wrong one is the solution with one mistake in one of its files.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
from pathlib import Path
from random import Random

import pytest

from labkit import acceptance
from tests.thorough import SLOW, mostly_thorough

CAPSTONE = acceptance.load("02")
CRITERIA = importlib.import_module("course.capstones.02_architecture.criteria")
PLANTING = importlib.import_module("course.capstones.02_architecture.planting")
SOLUTION = acceptance.folder_of("02_architecture") / "solution"
DEFAULT = """
from minimegatron.models.gpt_layer_specs import decoder_layer_spec as layers
"""
READS_ITS_OWN_TEXT = """
import hashlib, pathlib

def test_nothing_has_changed():
    text = pathlib.Path(__file__).with_name("architecture.py").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "{digest}"
"""


def graded(folder: Path, *only: str, seed: str = "1") -> dict[str, acceptance.Result]:
    found: list[acceptance.Result] = []
    options = argparse.Namespace(criteria=acceptance.chosen(",".join(only), CAPSTONE))
    try:
        CAPSTONE.run(folder, options, Random(seed), found.append)
    except acceptance.Missed as error:
        found += [acceptance.missed(criterion, error) for criterion in options.criteria[len(found) :]]
    assert [result.criterion for result in found] == options.criteria
    return {result.criterion.name: result for result in found}


def changed(folder: Path, file: str, *edits: tuple[str, str]) -> Path:
    """The solution with other words in a file."""
    shutil.copytree(SOLUTION, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / file).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / file).write_text(text)
    return folder


@SLOW
def test_the_solution_meets_what_costs_little():
    results = graded(SOLUTION, "gradients", "documents", "tensor_parallel", "generation")
    assert {name: result.told for name, result in results.items() if not result.met} == {}


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_solution_gets_every_point(seed):
    results = graded(SOLUTION, seed=seed)
    assert {name: result.told for name, result in results.items() if not result.met} == {}


ARCHITECTURE, REFERENCE, TESTS = "architecture.py", "reference.py", "test_architecture.py"
OWN = "own = ParamLayout((heads,), 0, parts, mesh.tp.rank, Init(value=1.0))"
SCALED = "self.norm[:, None, None]"
BEGIN = "        packed, state = self.input(x), context.state_of(self.layer_number)\n"
SET = "        self.norm = new_parameter(own, config.dtype)\n"
# criterion, file, what is written for what, what is said
WRONG: list[tuple[str, str, list[tuple[str, str]], str]] = [
    ("formula", REFERENCE, [(" / math.sqrt(d)", "")], r"self_attention is .* away from the reference, most at token"),
    ("formula", REFERENCE, [("import math\n", "import math\nimport architecture\n")], "imports architecture: it is to"),
    ("gradients", ARCHITECTURE, [("(-1)  # c", "(-1).detach()  # c")], "the backward pass says .*, two forward passes"),
    ("causal", ARCHITECTURE, [("place[:, None] >= place", "place[:, None] + 1 >= place")], "of earlier ones by"),
    ("causal", ARCHITECTURE, [("mean(-1, keepdim", "mean((0, -1), keepdim")], "moves logits of the sequence beside it"),
    ("documents", ARCHITECTURE, [("seen & (ids", "seen | (ids")], "moves logits of the next document"),
    (
        "tensor_parallel", ARCHITECTURE,
        [(OWN, "own = ParamLayout((self.d,), init=Init(value=1.0))"), (SCALED, "self.norm")],
        r"first the gradient of decoder\.layers\.\d\.self_attention\.norm differs",
    ),
    (
        "tensor_parallel", ARCHITECTURE,
        [('"sequence_parallel": mesh.sequence_parallel', '"sequence_parallel": False')], "raised|differs",
    ),
    (
        "pipeline", ARCHITECTURE,
        [(SET, f"{SET}        self.place = next(PLACES) % 2\n"), (SCALED, f"{SCALED} * (1 + self.place)"),
         ("class Gated", "PLACES = __import__('itertools').count()\n\n\nclass Gated")],
        r"pp2.*first the output of decoder\.layers\.\d\.self_attention",
    ),
    (
        "context_parallel", ARCHITECTURE,
        [(SET, f"{SET}        self.supports_context_parallel = True\n")], "cp2.*differs",
    ),
    (
        "recompute", ARCHITECTURE,
        [(SET, f"{SET}        self.calls = 0\n"), (BEGIN, f"{BEGIN}        self.calls += 1\n"),
         (SCALED, f"{SCALED} * self.calls")],
        r"with recompute .* away from without",
    ),
    (
        "resharded", ARCHITECTURE,
        [(SET, f"{SET}        self.seen = 1.0\n"), (BEGIN, f"{BEGIN}        self.seen *= 1.05\n"),
         (SCALED, f"{SCALED} * self.seen")],
        "in step 3 one process has loss and norm",
    ),
    ("generation", ARCHITECTURE, [("(k * kept[..., None])", "k")], "logits from kept states are .* away"),
    (
        "generation", ARCHITECTURE,
        [('(before,) = state.read_sequences("memory")',
          'before = state.context.state[self.layer_number]["memory"][state.context.slots]')],
        "what an earlier sequence has left is seen",
    ),
    ("planned", ARCHITECTURE, [(SCALED, f"{SCALED} * (1 + x.abs().max().item())")], "rank 0: .*not predicted"),
    ("learns", ARCHITECTURE, [(SCALED, f"{SCALED} * 0")], r"the loss goes from \d\.\d\d to 1\.[34]"),
    ("mistakes", TESTS, [("def test_it", "def it"), ("def test_gen", "def gen"), ("def test_every", "def every")],
     r"of \d+ mistakes are noticed; not: line \d+"),
    ("mistakes", TESTS, [("< 1e-10\n\n\ndef test_generation", "> 1e-10\n\n\ndef test_generation")],
     "your own tests do not pass"),
]  # fmt: skip
IDS = [f"{criterion}-{told[:30]}" for criterion, _, _, told in WRONG]


@pytest.fixture
def few_mistakes(monkeypatch):
    """Four in place of twelve: each costs two jobs."""
    monkeypatch.setattr(CRITERIA, "MISTAKES", 4)
    monkeypatch.setattr(CRITERIA, "FEWEST", 4)


@SLOW
@pytest.mark.parametrize(
    "criterion, file, edits, told", mostly_thorough(WRONG, [0, 4, 6, 13], [0]), ids=IDS
)  # fmt: skip
def test_a_mistake_loses_its_criterion_and_is_told(tmp_path, few_mistakes, criterion, file, edits, told):
    (result,) = graded(changed(tmp_path, file, *edits), criterion).values()
    assert not result.met and re.search(told, result.told), result.told
    assert result.criterion.limit in acceptance.line(result)


def test_the_packages_own_layer_is_no_architecture(tmp_path):
    changed(tmp_path, ARCHITECTURE)
    (tmp_path / ARCHITECTURE).write_text(DEFAULT)
    results = graded(tmp_path)
    assert len(results) == 13 and not any(result.met for result in results.values())
    assert all("has a module whose class, with a `forward`, is written in" in one.told for one in results.values())


@SLOW
def test_tests_that_read_the_text_of_the_architecture_notice_nothing(tmp_path, few_mistakes):
    import hashlib

    digest = hashlib.sha256((SOLUTION / ARCHITECTURE).read_bytes()).hexdigest()
    changed(tmp_path, TESTS)
    (tmp_path / TESTS).write_text(READS_ITS_OWN_TEXT.format(digest=digest))
    (result,) = graded(tmp_path, "mistakes").values()
    assert not result.met and "they fail for a architecture.py that does the same" in result.told


def test_mistakes_are_drawn_from_all_lines_and_are_all_different():
    source = (SOLUTION / ARCHITECTURE).read_text()
    found = list(PLANTING.planted(source, Random(1)))
    assert len(found) > 100 and len({one.source for one in found}) == len(found)
    lines = {one.line for one in found}
    assert len({one.line for one in found[: len(lines)]}) == len(lines), "each line once before any twice"
    assert [one.source for one in found] == [one.source for one in PLANTING.planted(source, Random(1))]
    assert [one.source for one in found] != [one.source for one in PLANTING.planted(source, Random(2))]
    for number, line in enumerate(found[0].source.splitlines(), 1):
        assert line == source.splitlines()[number - 1] or number >= found[0].line


def test_what_changes_is_said_by_the_way_in_which_it_was_asked():
    import torch

    one = {"forward": torch.ones(2), "states": torch.ones(2), "ranks": "RankError: no"}
    assert PLANTING.changed(one, dict(one)) == []
    other = {"forward": torch.ones(2) + 1e-12, "states": torch.tensor([1.0, torch.nan]), "ranks": "ConfigError: no"}
    assert PLANTING.changed(one, other) == ["states"]
    assert PLANTING.changed(one, {**one, "forward": "IndexError: 3"}) == ["forward"]
