"""Every number that lab 07's prose states, computed again: the sentence must occur in the lab with this number."""

from __future__ import annotations

import itertools
import math
import re
from importlib import import_module

import pytest
import torch

from course.figures.kernels import kinds, numbers_of, tree_steps
from tests.labkit.cells import SOURCES

SOURCE = next(path for path in SOURCES if path.parent.name == "07_kernels_flash_fp8")
PROSE = " ".join(re.sub(r"^# ?", "", line) for line in SOURCE.read_text().splitlines() if line.startswith("#"))
PROSE = re.sub(r"\s+", " ", PROSE)
FLASH = import_module("course.07_kernels_flash_fp8.checks.flash")
FP8 = import_module("course.07_kernels_flash_fp8.checks.fp8")
SCALES = import_module("course.07_kernels_flash_fp8.checks.scales")
LAB = import_module("course.07_kernels_flash_fp8").LAB

H, RIDGE = 4096, 989e12 / 3.35e12
NORM = 4 * H * H / (2 * H * H * 2)  # FLOP per byte, in bf16
WORDS = {2: "two", 4: "four", 6: "six", 7: "seven", 8: "eight", 9: "nine"}


def seconds_of(vectors: int) -> float:
    return max(2 * H * H * vectors / 989e12, (H * H + 2 * H * vectors) * 2 / 3.35e12)


def power(exponent: float) -> str:
    return f"2^{exponent:.0f}"


def cast(x: float, **format: float) -> float:
    return FP8.to_fp8(torch.tensor([x]), **format).item()


def off(format: dict[str, float]) -> float:
    """The largest relative error between 1 and 2, at the place half-way to a neighbour."""
    numbers = [n for n in numbers_of((format["mantissa"], format["lowest"], format["top"]), 1.0, 2.0)]
    return max((b - a) / (b + a) for a, b in itertools.pairwise(numbers))


BY_HAND = SCALES.delayed([{"history": 2, "top": 448.0, "amaxes": [
    [[2.0], [4.0]], [[1.0], [1.0]], [[math.inf], [1.0]], [[2.0], [1.0]]]}])[0]  # fmt: skip
BITS = {name: [*numbers_of((f["mantissa"], f["lowest"], f["top"]), 0.0, f["top"])]
        for name, f in (("E4M3", FP8.E4M3), ("E5M2", FP8.E5M2))}  # fmt: skip
PAIR = FP8.tile_scales(torch.tensor([[1.0, -2.0]]), [1, 2], 448.0).item()  # in E8M0
TREE = len(tree_steps([1.0] * 256)) - 1  # steps
KEYS = [sum(kind != "hidden" for kind in row) * 3 for row in kinds(12, 4, 3)]
STATED = [
    # section 1
    ("{} times. Each operation reads", WORDS[2 + 1 + 2 + 2].capitalize()),
    ("the fused norm is {} times faster", f"{7 / 2:g}"),
    ("A fused norm moves {} times fewer bytes", f"{7 / 2:g}"),
    ("it takes the {} µs of its launch", "5"),
    ("a thousandth of both, {} and 0.5 µs", f"{4e6 / 1000e12 * 1e6:g} µs"),
    ("The norm of 8192 tokens has {} µs of work", f"{2 * 8192 * H * 2 / 3.35e12 * 1e6:.0f}"),
    ("The norm of 8 tokens has {} µs of work", f"{2 * 8 * H * 2 / 3.35e12 * 1e6:.2f}"),
    ("{} million bf16 numbers are read and written", f"{5e-6 * 3.35e12 / 4 / 1e6:.1f}"),
    ("in that time, {} tokens of width 4096", f"{round(5e-6 * 3.35e12 / 4 / H, -3):.0f}"),
    # the roofline
    ("To compute takes {} µs", f"{4e9 / 1000e12 * 1e6:g}"),
    ("to move takes {} µs", f"{2e9 / 4e12 * 1e6:g}"),
    ("The intensity is {} FLOP a byte", f"{4e9 / 2e9:g}"),
    ("the ridge is {}.", f"{1000e12 / 4e12:g}"),
    ("128 vectors take {} % longer than one", f"{100 * (seconds_of(128) / seconds_of(1) - 1):.0f}"),
    ("could do {} times the norm's operations", f"{RIDGE / NORM:.0f}"),
    ("it uses {} % of their arithmetic", f"{100 * NORM / RIDGE:.2f}"),
    ("the product with one vector stand in one place: {} FLOP a byte", f"{NORM:g}"),
    ("If memory were all, it would take 2/7 = {} of the time", f"{2 / 7:.2f}"),
    ("67 TFLOP/s, it uses {} %", f"{100 * NORM / (67e12 / 3.35e12):.0f}"),
    # kernels
    ("You write {} kernels", WORDS[sum(exercise.prepare is not None for exercise in LAB.exercises.values())]),
    ("10 numbers in blocks of 4 threads need {} blocks", f"{-(-10 // 4)}"),
    ("that is {} threads, and the last two", f"{-(-10 // 4) * 4}"),
    ("and the last {} of them have no number", WORDS[-(-10 // 4) * 4 - 10]),
    ("**sectors** of 32 bytes, {} floats", WORDS[32 // 4]),
    ("with 16 numbers each hold {} columns", f"{256 * 16}"),
    ("an SM has {} of them", f"{65536:,}"),
    ("dγ is (1 + 0 + 3, 0 + 2 - 1) = {}.", "(4, 1)"),
    ("{} barriers a row", WORDS[TREE + 1].capitalize()),
    ("with 256 the lower {} add", f"{256 // 2}"),
    ("5^4 is {}, 5^1 is 4", f"{5 ^ 4}"),
    ("5^1 is {}.", f"{5 ^ 1}"),
    ("With o = {} and a sum", "16, 8, 4, 2, 1"),
    # flash attention
    ("together are {} matrix products", WORDS[2 + 4]),
    ("S once more makes {}", WORDS[2 + 4 + 1]),
    ("and there are {} blocks", f"{65536 // 128}"),
    ("would take {} GiB each", f"{65536**2 * 2 / 2**30:g}"),
    # FP8
    ("with e from -6 to {}, at most", f"{math.floor(math.log2(448))}"),
    ("with e from -6 to 8, at most {}.", f"{max(BITS['E4M3']):g}"),
    ("steps stay as they are, {}, down to 0", power(math.log2(BITS["E4M3"][1]))),
    ("e from -14, at most {}.", f"{max(BITS['E5M2']):g}"),
    ("there are {} steps in E4M3", WORDS[sum(1 < n <= 2 for n in BITS["E4M3"])]),
    ("steps in E4M3, {} in E5M2", WORDS[sum(1 < n <= 2 for n in BITS["E5M2"])]),
    ("0.3 = {} · 2^-2", f"{0.3 * 4:g}"),
    ("and 0.3 is {} of them", f"{0.3 / 2**-5:g}"),
    ("Rounded, 10 steps: {}.", f"{cast(0.3, **FP8.E4M3):g}"),
    ("The numbers around 17 are {}.", ", ".join(f"{n:g}" for n in BITS["E4M3"] if 15 < n < 21)),
    ("the error is at most 1/{} (E4M3)", f"{1 / off(FP8.E4M3):.0f}"),
    ("(E4M3) or 1/{} (E5M2)", f"{1 / off(FP8.E5M2):.0f}"),
    ("{}, half-way from 1 to the next number", f"{(1 + min(n for n in BITS['E4M3'] if n > 1)) / 2:g}"),
    ("of E4M3, is off by {}.", f"{1.0625 - cast(1.0625, **FP8.E4M3):g}"),
    ("448 · 2^-8 = {} is too small", f"{448 * 2**-8:g}"),
    ("448 · 2^-7 = {} is enough", f"{448 * 2**-7:g}"),
    ("the byte is 127 - 7 = {}.", f"{PAIR}"),
    ("448/4 = {} |", f"{BY_HAND[1][0]:g}"),
    ("| 1, then 1 | 4, 1 | {} |", f"{BY_HAND[2][0]:g}"),
    ("| 1, 0 | {}, left |", f"{BY_HAND[3][0]:g}"),
    ("448/2 = {} |", f"{BY_HAND[4][0]:g}"),
    ("The casts hold {}, their product", f"{3 * 2} and {5 * 4}"),
    ("their product is {}, and", f"{3 * 2 * 5 * 4}"),
    ("and 120/(2·4) = {}.", f"{3 * 5}"),
    ("Tiles lose one tile of {}", f"{64 * 512 // 32}"),
    # explain
    ("Predicted: {}/7 of the rate of a copy", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "number"), STATED, ids=lambda value: value[:40])
def test_a_number_of_the_prose_is_what_comes_out(sentence: str, number: str) -> None:
    before, after = sentence.split("{}")
    assert before + number + after in PROSE, f"{before}{number}{after}"


def test_three_mantissa_bits_cost_what_the_lab_says() -> None:
    """2.6 % of normal numbers in the middle of the range, whatever the scale."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    for scale in (16.0, 97.3):
        back = FP8.to_fp8(x * scale, **FP8.E4M3) / scale
        assert f"{100 * ((back - x).norm() / x.norm()).item():.1f}" == "2.6"
    assert PROSE.count("2.6 %") == 2


def test_what_flash_attention_saves_at_the_end_is_what_its_formula_gives() -> None:
    moved = FLASH.flash_bytes(65536, 128, 128, 64, 2)
    assert round(moved["standard"] / moved["flash"], 1) == 4.0
    assert KEYS == [6, 9, 12]  # of the picture
