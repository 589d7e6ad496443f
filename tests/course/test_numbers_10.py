"""Every number that lab 10's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import Request
from tests.course.marked import LABS

LAB = LABS["10_inference_serving"].lab
SOURCE = Path(str(import_module("course.10_inference_serving").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())
H100 = {"memory": 80e9, "bandwidth": 3.35e12, "flops": 989e12}
LLAMA = {"parameters": 8_030_261_248, "layers": 32, "groups": 8, "d": 128, "bytes": 2}
MINUTES = {"A": 20, "B": 80, "C": 20, "D": 25}


def right(exercise, case=0, **inputs):
    return LAB[exercise].reference(**{**LAB[exercise].cases[case].inputs, **inputs})


EXAMPLE = right("decode_step")
LIMIT = round(H100["flops"] / H100["bandwidth"])
ANSWERS = [12, 3, 5, 2, 9, 2, 4, 3]
FIVE = {"a": (10, 9), "b": (5, 12), "c": (13, 6), "d": (4, 5), "e": (7, 4)}
LONG = right("decode_step", model=LLAMA, sequences=1, length=2000, page=16, gpu=H100)
SIXTEEN = right("decode_step", model=LLAMA, sequences=16, length=2000, page=16, gpu=H100)

STATED = [
    ("Together about {} and a half hours", sum(MINUTES.values()) // 60),
    ("| B | 3 Implement: pages, steps, proposals | {} h {} min |", [*divmod(MINUTES["B"], 60)]),
    ("How many of the {:,} tokens", 20 * (1000 + 30)),
    ("The document fills {} pages; its last {} tokens", [1000 // 16, 1000 % 16]),
    ("`keep([1, 2, 3, 4, 5], [7, 3, 9])` a request `[1, 2, 3, 9]` begins with `{}`", [right("prefixes")[0]]),
    ("| D | 6 Break it · 7 Explain | {} min |", MINUTES["D"]),
    ("Llama 3 8B has {:.2f}·10⁹ parameters, in bf16 16 GB", LLAMA["parameters"] / 1e9),
    ("so in the time of one byte it could do {} FLOPs", LIMIT),
    ("One answer uses 1/{} of the arithmetic", LIMIT),
    ("some {} tokens have to share a weight", LIMIT),
    ("{token} bytes", EXAMPLE),
    ("{:.0f} seconds, 4/6 tokens a second", EXAMPLE["seconds"]),
    ("so a step reads {read}", EXAMPLE),
    ("so {most:.0f} sequences fit", EXAMPLE),
    ('{{"token": {token}, "read": {read}, "seconds": {seconds}, "rate": 4 / 6, "most": {most}}}', EXAMPLE),
    ("it is 1/{:.0f} of this model", LLAMA["parameters"] / (128256 * 4096)),
    ("Sixteen people together get {:.0f} times as many tokens", SIXTEEN["rate"] / LONG["rate"]),
    ("From about {} sequences on, their caches", round(2 * LLAMA["parameters"] / (2000 * LONG["token"]), -1).__int__()),
    ("200 sequences have {:,} tokens in a step", 200 * 5),
    ("it would be {:,} keys", sum(range(1, 1001))),
    ("The answers have {}, {}, {} and {} tokens, then {}, {}, {} and {}", ANSWERS),
    ("needs less than {} steps: a has 12 tokens", max(ANSWERS)),
    ("a = 0.8 and k = 4 that is {:.1f}", sum(0.8**i for i in range(5))),
    ("{} in the example.", str(right("schedule")).replace("'", '"')),
    ("The answer gets the tokens {} and {}.", right("verify")),
    ("with pages for {} tokens and a budget of 8", 4 * 11),
    ("as if they were a prompt: {} tokens", FIVE["c"][0] + 4),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "value"), STATED, ids=[sentence[:40] for sentence, _ in STATED])
def test_the_text_states_what_comes_out(sentence, value):
    if isinstance(value, dict):
        said = sentence.format(**value)
    else:
        said = sentence.format(*value) if isinstance(value, list) else sentence.format(value)
    assert " ".join(said.split()) in " ".join(TEXT.split()), f"the lab does not say: {said}"


def test_the_largest_number_of_sequences_in_the_text_is_what_fits():
    assert f"for n in (1, 16, 64, {LONG['most']:.0f})" in TEXT and f"64, 128, {LONG['most']:.0f}]" in TEXT


def test_the_tight_run_is_told_as_it_goes():
    """Steps are counted from 0; the fifth page of c is the first for which there is none."""
    scheduler = Scheduler(BlockManager(12, 4, reuse=False), 4, 8, 64)
    c, steps = {n: scheduler.add(Request((1,) * p, new), n)[0] for n, (p, new) in FIVE.items()}["c"], []
    while scheduler.has_work:
        had = len(c.pages)
        step = scheduler.schedule()
        steps.append({chunk.sequence.request_id: chunk.count for chunk in step.chunks})
        if c.preemptions and had and not c.pages:
            assert len(steps) - 1 == 7 and had == 4 and c.waiting_tokens == len(c.tokens) == 17
        if len(steps) == 9:
            assert next(one.pages for one in scheduler.running if one.request_id == "a") == [1, 2, 3, 10, 9]
        for chunk in step.chunks:
            scheduler.computed(chunk)
            if chunk.draws:
                chunk.sequence.append(1)
                if chunk.sequence.reason is not None:
                    scheduler.finish(chunk.sequence)
    assert [n for n, step in enumerate(steps) if step.get("c", 0) > 1] == [2, 3, 10, 11, 12]
    assert sum(step["c"] for step in steps[10:13]) == 17 and "a" not in steps[10]
    for said in ("In step 7 c needs a fifth page", "In step 10 a is complete", "a has 1, 2, 3, 10 and 9"):
        assert said in TEXT


def test_the_example_of_proposed_tokens_is_the_visible_case():
    shown = LAB["verify"].cases[0].inputs
    for place in (0, 1):
        p, q = (", ".join(f"{x:g}" for x in shown[name][place].tolist()) for name in "pq")
        assert f"| {place} | {p} | {q} |" in TEXT
    (_, one, two), u, v = (shown["p"][1] - shown["q"][1]).clamp(min=0).tolist(), shown["u"][1], shown["v"][1]
    assert shown["q"][1, 0] / shown["p"][1, 0] == pytest.approx(3) and one == two
    assert f"three times as often; u = {u:g}: rejected. 1 and 2 lack equally much; with v = {v:g} the draw is 1" in TEXT


def test_the_model_that_is_measured_has_31_million_parameters_in_125_megabytes():
    from minimegatron.comm.mesh import Mesh
    from minimegatron.models.decoder import GPTModel
    from minimegatron.models.families import family_config

    sizes = {"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4}
    for name, size in {**sizes, "ffn_hidden_size": 4096, "vocab_size": 258}.items():
        assert f"{name}={size}" in TEXT
    with torch.device("meta"):
        model = GPTModel(family_config("llama", ffn_hidden_size=4096, vocab_size=258, **sizes), Mesh.serial())
    count = sum(p.numel() for p in model.parameters())
    assert round(count / 1e6) == 31 and round(4 * count / 1e6) == 125
