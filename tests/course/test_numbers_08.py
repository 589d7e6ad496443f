"""Every number that lab 08's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from course.lab08.disk import Disk

from tests.course.marked import LABS

LAB = LABS["08_checkpoints"].lab
SOURCE = Path(str(import_module("course.08_checkpoints").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())

MINUTES = {"A": 45, "B": 120, "C": 120, "D": 120, "E": 30, "F": 60}
GPUS, HOURS = 16_384, 50_000


def right(exercise, **inputs):
    return LAB[exercise].reference(**inputs)


def boxes(r):
    start, stop = ((0, 13), (13, 27))[r % 2]
    return right("boxes_of", rows=9, columns=6, dim=1, parts=2, part=r // 2, start=start, stop=stop)


TINY = right("costs", **LAB["costs"].cases[0].inputs)
LLAMA = right("costs", parameters=405_000_000_000, ranks=GPUS, gigabytes=2000 / GPUS, gpu_hours=HOURS, every=600)
EXAMPLE = right("boxes_of", **LAB["boxes_of"].cases[0].inputs)
SWAPPED = LAB["by_name"].cases[0].inputs
WHOSE = right("whose", **LAB["whose"].cases[0].inputs)

STATED = [
    ("Together {} hours", "8–9" if 480 <= sum(MINUTES.values()) <= 540 else "other"),
    ("| A | 1 The problem · 2 Predict | {} min |", f"{MINUTES['A']}"),
    ("| B | 3 Implement: regions, a save that survives | {} h |", f"{MINUTES['B'] // 60}"),
    ("| C | 3 Implement: a save by many ranks, a save in the background | {} h |", f"{MINUTES['C'] // 60}"),
    ("| D | 3 Implement: resuming a run, formats of others, a published model | {} h |", f"{MINUTES['D'] // 60}"),
    ("| E | 4 Run · 5 See | {} min |", f"{MINUTES['E']}"),
    ("| F | 6 Break it · 7 Explain | {} h |", f"{MINUTES['F'] // 60}"),
    ("A rank of section 2 writes 4 GB in {:.0f} seconds", TINY["seconds"]),
    ("with a save every {:.0f} seconds in place of 240", (2 * TINY["seconds"] / 25 * TINY["between_failures"]) ** 0.5),
    ("fails once in 50,000 hours: nearly {} years", "six" if 5.5 < HOURS / 24 / 365 < 6 else "other"),
    ("[{}, {}],  # rank 0: rows 0 to 4", boxes(0)),
    ("[{}, {}], [{}, {}], [{}, {}],", [box for r in (1, 2, 3) for box in boxes(r)]),
    ("which keep 13 and 14 of its {} numbers", f"{9 * 3}"),
    ("This matrix has {} numbers.", f"{9 * 6}"),
    ("AdamW's two averages, has {} TB", f"{LLAMA['bytes'] / 1e12:.1f}"),
    ("2·10⁹ parameters are {:.0f} GB", TINY["bytes"] / 1e9),
    ("7 ranks that write 1 GB a second each need {:.0f} seconds", TINY["seconds"]),
    ("7 of them once in 2 hours, {:.0f} seconds", TINY["between_failures"]),
    ("4/240 + 240/14400 = 1/60 + 1/60 of the time, for saves and for failures. This is the {}",
     "best" if TINY["best"] == 240 else "other"),
    ("In the example: {:.0f}·10⁹, {:.0f}, {:.0f}, 1/{:.0f} and {:.0f}.", [TINY["bytes"] / 1e9, TINY["seconds"],
     TINY["between_failures"], 1 / TINY["lost"], TINY["best"]]),
    ("in 54 days on 16,384 GPUs: one in {:.1f} hours", 54 * 24 / 419),
    ("A run that fails {} times a day", {8: "eight"}[round(24 * 3600 / LLAMA["between_failures"])]),
    ("{} in the example; the last number is not included.", str(EXAMPLE)),
    ("row 2 {} {} {} row 3 {} {} {} row 4 {} {} {}", list(range(4, 13))),
    ("needs numbers {} and {}, and then {} and {}: two reads", [4 + 3 * (row - 2) + column - 1 for row in (3, 4)
     for column in (2, 3)]),
    ("of 5.7 TB read by 16,384 ranks is {:,} TB", round(LLAMA["bytes"] * GPUS / 1e12, -3).__int__()),
    ("{{0: k's, 1: q's}} for saved_names = {}", '["q", "k"]' if right("by_name", **SWAPPED)[0] is SWAPPED["state"][1]
     else "other"),
    ('{{"a": "b", "b": "b", "c": None}}: a has been given b\'s{}', "," if WHOSE == {"a": "b", "b": "b", "c": None}
     else "?"),
    ("rows for four query heads in {} groups", {2: "two"}[LAB["from_hf"].cases[0].inputs["groups"]]),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "value"), STATED, ids=[sentence[:40] for sentence, _ in STATED])
def test_the_text_states_what_comes_out(sentence, value):
    said = sentence.format(*value) if isinstance(value, list) else sentence.format(value)
    assert " ".join(said.split()) in " ".join(TEXT.split()), f"the lab does not say: {said}"


def test_the_losses_of_the_best_interval_are_equal():
    inputs = LAB["costs"].cases[0].inputs
    assert TINY["seconds"] / 240 == 240 / (2 * TINY["between_failures"]) == 1 / 60
    assert all(right("costs", **{**inputs, "every": every})["lost"] > TINY["lost"] for every in (200.0, 280.0))


def test_the_first_step_of_a_fresh_adamw_is_the_learning_rate():
    assert "AdamW's first step moves every number by the whole learning rate, however small its gradient" in TEXT
    weights = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weights], lr=0.01, weight_decay=0.0)
    weights.grad = torch.tensor([1e-4, 1.0, -100.0])
    optimizer.step()
    torch.testing.assert_close(weights.detach(), torch.tensor([-0.01, -0.01, 0.01]), rtol=1e-3, atol=0.0)


def test_the_table_of_the_disk_is_what_the_disk_does():
    """An empty file, or half of one, until its fsync; old names until that of the folder; neither does the other's."""
    disk = Disk({"step-10/f": b"1234"})
    disk.mkdir(".new")
    disk.write(".new/f", b"1234")
    disk.fsync(".new/f")
    assert any(not left.files for folders in disk.after_a_power_cut() for left in folders.get(".new", []))
    disk.fsync(".new")
    disk.write(".new/g", b"1234")
    disk.fsync(".new")
    found = {
        data for folders in disk.after_a_power_cut() for left in folders.get(".new", []) for data in left.files["g"]
    }
    assert found == {b"", b"12", b"1234"}
    assert any(".new" not in folders for folders in disk.after_a_power_cut())


def test_packed_rows_stand_as_in_the_picture():
    q, k, v = torch.arange(4), torch.tensor([10, 11]), torch.tensor([20, 21])
    packed = import_module("course.08_checkpoints.checks.published").packed(q, k, v, 4, 2)
    names = [{0: "q", 1: "k", 2: "v"}[int(n) // 10] + str(int(n) % 10) for n in packed]
    assert f'("linear_qkv", "{" ".join(names)}", [0, 0, 0, 0, 1, 1, 1, 1])' in TEXT
