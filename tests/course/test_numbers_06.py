"""Every number that lab 06's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from minimegatron.parallel.data.buckets import BUCKET_ALIGNMENT, PARAM_ALIGNMENT
from tests.course.marked import LABS

LAB = LABS["06_data_parallel_zero"].lab
SOURCE = Path(str(import_module("course.06_data_parallel_zero").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())

MINUTES = {"A": 45, "B": 150, "C": 75, "D": 45, "E": 60}
ZERO = {"weight": 2, "gradient": 2, "optimizer": 12}


def right(exercise, **inputs):
    return LAB[exercise].reference(**inputs)


def held(stage, ranks, parameters=7_500_000_000, **each):
    return right("bytes_held", parameters=parameters, ranks=ranks, stage=stage, **(each or ZERO))


def sent(stage, microbatches=1, weights=15, gradients=15, ranks=64, kept=False):
    return right("bytes_sent", stage=stage, weights=weights, gradients=gradients, ranks=ranks,
                 microbatches=microbatches, kept=kept)  # fmt: skip


WHOLE = sum(held(0, 64).values()) / 1e9
STAGE_1 = sum(held(1, 64).values()) / 1e9
TEN = held(2, 2, parameters=10)
MEGATRON = 1 - sum(held(1, 64, weight=2, gradient=4, optimizer=12).values()) / 1e9 / (18 * 7.5)
SMALL = [sent(stage, weights=8, gradients=16, ranks=4) for stage in range(4)]
OF_GRADIENTS, OF_WEIGHTS = 16 * 3 // 4, 8 * 3 // 4
CLUSTER = right("answers", **LAB["answers"].cases[0].inputs)
EXAMPLE = {"numels": [4, 2, 5], "bucket_size": 6, "ranks": 2}
LAYOUT = right("lay_out", **EXAMPLE)
PIECES = [right("my_pieces", numels=[4, 2, 5], **LAYOUT, ranks=2, rank=rank) for rank in range(2)]
MODEL = {"numels": [30, 5, 25, 5, 15, 3], "ranks": 4}
MODEL_LAYOUT = right("lay_out", **MODEL, bucket_size=30)
OWNERS = [
    sum(any(piece[0] == i for piece in right("my_pieces", **MODEL, **MODEL_LAYOUT, rank=rank)) for rank in range(4))
    for i in range(6)
]
STEP = LAB["sharded_adamw"].reference(LAB["sharded_adamw"].cases[0].inputs)[0]["weights after step 1"].tolist()
NORM = LAB["clip"].reference(LAB["clip"].cases[0].inputs)[0]["norm"]
TINY = LAB["gather_on_use"].reference(LAB["gather_on_use"].cases[0].inputs)[0]["y"].item()
SMALL_ERROR = right("suspects", got=[torch.tensor([4.0, 0.001])], want=torch.tensor([4.0, 0.0]))
FACTORS = right("suspects", got=[torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0])], want=torch.tensor([1.0, 2, 3]))
FOUR = right("sums", **LAB["sums"].cases[0].inputs)
HAND_INPUTS = LAB["tokens_to_hide"].cases[0].inputs
HAND = right("tokens_to_hide", **HAND_INPUTS)
HUGE = right("tokens_to_hide", parameters=218e6, ranks=1024, flops=400e12, bandwidth=50e9, latency=10e-6, weight=2,
             gradient=4)  # fmt: skip
HALVES = LAB["hybrid"].reference(LAB["hybrid"].cases[0].inputs)

STATED = [
    ("Together about {} hours", f"{sum(MINUTES.values()) / 60:.0f}"),
    ("| A | 1 The problem · 2 Predict | {} min |", f"{MINUTES['A']}"),
    ("| B | 3 Implement | {} |", "{} h {} min".format(*divmod(MINUTES["B"], 60))),
    ("| C | 4 Run · 5 See | {} |", "{} h {} min".format(*divmod(MINUTES["C"], 60))),
    ("| D | 6 When sharding stops paying | {} min |", f"{MINUTES['D']}"),
    ("| E | 7 Break it · 8 Explain | {} h |", f"{MINUTES['E'] // 60}"),
    ("It needs {} GB, and a GPU has 80", f"{WHOLE:.0f}"),
    ("64 equal copies of these {} GB", f"{WHOLE:.0f}"),
    ("Weights are whole: {} bytes.", f"{TEN['weights']:.0f}"),
    ("optimizer's state are halved: {} bytes.", f"{TEN['gradients']:.0f} and {TEN['optimizer']:.0f}"),
    ("Stage 1 alone saves {}", "three quarters" if 0.73 < 1 - STAGE_1 / WHOLE < 0.77 else "other"),
    ("and with it the model {}.", "fits" if STAGE_1 < 80 else "does not fit"),
    ("({} with Megatron's fp32 gradients)", "two thirds" if 0.64 < MEGATRON < 0.68 else "other"),
    ("sends three quarters: {}.", f"{OF_GRADIENTS} bytes of the gradients, {OF_WEIGHTS} of the weights"),
    ("| 0 | 2 · 12 = {} bytes |", f"{SMALL[0]:.0f}"),
    ("| 1 and 2 | 12 + 6 = {} bytes |", f"{SMALL[1]:.0f}" if SMALL[1] == SMALL[2] else "other"),
    ("| 3 | 12 + 2 · 6 = {} bytes |", f"{SMALL[3]:.0f}"),
    ("whole = {}  # bytes of 7.5 B fp16 weights", f"{int(2 * 7.5e9):_}"),
    ("one more all-gather, {} times as much in all", f"{sent(3) / sent(0):.1f}"),
    ("and stage 3 nearly {} times as much", f"{sent(3, weights=4, gradients=4) / sent(0, weights=4, gradients=4):.1f}"),
    ("stage 2 sends {} more reduce-scatter,", {1: "one"}[2 - 1]),
    ('("bf16", 2, (1, {}))', "2"),
    ("stages 1 and 2 send {} as plain data parallelism", "exactly as much" if sent(1) == sent(2) == sent(0) else ""),
    ("Parameter 2 comes first, at {}.", f"{LAYOUT['places'][2]} to {LAYOUT['places'][2] + 5}"),
    ("Parameter 1 follows, at {}.", f"{LAYOUT['places'][1]} to {LAYOUT['places'][1] + 2}"),
    ("It is padded to {}.", f"{LAYOUT['buckets'][0][1]}"),
    ("Parameter 0 lies at {}.", f"{LAYOUT['places'][0]} to {LAYOUT['places'][0] + 4}"),
    ("Rank 0 owns {}, the first half of the second.", "0 to 4, the first half of the first bucket, and 8 to 10"),
    ('"places": {},', f"{LAYOUT['places']}"),
    ('"buckets": {}}}', f"{LAYOUT['buckets']}"),
    ("{} for rank 0 of the example.", f"{PIECES[0]}"),
    ("So rank 0 has its elements {}", "{} to {}".format(*PIECES[0][0][1:3])),
    ("rank 1 has element {} alone", "{}".format(*PIECES[1][0][1:2])),
    ("Find the parameter of which all {} ranks own a piece.", "four" if OWNERS.count(4) == 1 else "other"),
    ("[0.95 - 0.1, 2 + 0.1] = {}.", f"[{STEP[0]:.2f}, {STEP[1]:.1f}]"),
    ("(2 · 5 + 3 · 7) = {}, on a rank", f"{TINY:.0f}"),
    ("rank 0 returns [{}] for it", f"{2 * (1 + 10)}"),
    ("For unit 0 it returns [{}].", f"{5 * (1 + 10)}"),
    ("has the factors {}.", "{:.0f} and {}".format(*FACTORS)),
    ("And [4, 0.001] for [4, 0] is {}:", "right" if SMALL_ERROR == [1.0] else "wrong"),
    ('{{"stage": {stage}, "ranks_for_stage_1": {ranks_for_stage_1}, ..., "stages": {stages}}}', CLUSTER),
    ("{} bytes a parameter, eight small layers", f"{2} + {4} + {12}"),
    ("gathers: {} bytes a parameter.", f"{4} + {4} + {8}"),
    ("on four ranks, {} steps, beside", {40: "forty"}[40]),
    ("LIMIT, STEPS = {}, 40", "0.04"),
    ("optim_grads --ddp-bucket-size {}`", "60000"),
    ('"ddp_bucket_size": {}}}', f"{60000:_}"),
    ("begins at a multiple of {} bytes", f"{2 * BUCKET_ALIGNMENT}"),
    ("The norm is {} on both ranks.", f"{NORM:.0f}"),
    ("8 microbatches send {} times the bytes of stage 1", f"{sent(3, 8) / sent(1, 8):.0f}"),
    ("256 + 1 = 257 is no bf16 number, and is rounded to {}", f"{(torch.tensor(256.0).bfloat16() + 1).item():.0f}"),
    ("The ring leaves {}", str([round(x) for x in FOUR["ring"].flatten().tolist()])),
    ("and the tree {}, four times", f"{FOUR['tree'][0].item():.0f}"),
    ("with gradients of 4 bytes it needs {} tokens".replace("with", "With"), f"{HAND:.0f}"),
    ("So {} tokens hide the gather", f"{right('tokens_to_hide', **{**HAND_INPUTS, 'gradient': 0}):.0f}"),
    ("218 million", "218 million" if 4096**2 * 2.5 + 3 * 4096 * 14336 == pytest.approx(218e6, rel=2e-3) else "other"),
    ("On 1,024 GPUs the batch would have {} million tokens.", f"{1024 * HUGE / 1e6:.0f}"),
    ("Ranks 0 and 2 end with {}, ranks 1 and 3 with", f"{HALVES[0].item():.0f}" if torch.equal(*HALVES[::2]) else ""),
    ("ranks 1 and 3 with {}.", f"{HALVES[1].item():.0f}" if torch.equal(*HALVES[1::2]) else ""),
    ("over 8 GPUs are {} GB for 8 billion parameters", f"{16 * 8 // 8}"),
    ("and {} GB for 70 billion", f"{16 * 70 // 8}"),
    ("a parameter starts at a multiple of {} elements", f"{PARAM_ALIGNMENT}"),
    ("a bucket ends at a multiple of {},", f"{BUCKET_ALIGNMENT}"),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "value"), STATED, ids=[sentence[:40] for sentence, _ in STATED])
def test_the_text_states_what_comes_out(sentence, value):
    said = sentence.format(**value) if isinstance(value, dict) else sentence.format(value)
    assert said in TEXT, f"the lab does not say: {said}"


def test_the_table_of_the_zero_paper():
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks."""
    assert [f"{sum(held(stage, 64).values()) / 1e9:.1f}" for stage in range(4)] == ["120.0", "31.4", "16.6", "1.9"]


def test_megatrons_convention_is_18_bytes_then_6_and_12_shared_out():
    each = {"weight": 2, "gradient": 4, "optimizer": 12}
    assert [sum(held(stage, 4, parameters=1, **each).values()) for stage in range(4)] == [
        18,
        6 + 12 / 4,
        2 + 16 / 4,
        18 / 4,
    ]
