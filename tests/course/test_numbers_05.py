"""Every number that lab 05's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

import itertools
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch

from course.figures.experts import busiest, journey
from minimegatron.config import TransformerConfig
from minimegatron.models.chunks import count_parameters
from minimegatron.models.families import preset
from tests.course.marked import LABS

LAB = LABS["05_moe_ep"].lab
SOURCE = Path(str(import_module("course.05_moe_ep").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())

V3 = TransformerConfig.from_dict(preset("deepseek-v3"))
EXPERTS = sum(V3.expert_layers) * V3.num_experts * 3 * V3.hidden_size * V3.moe_ffn_hidden_size  # their parameters
MINUTES = {"A": 60, "B": 120, "C": 75, "D": 45}


def right(exercise, **inputs):
    return LAB[exercise].reference(**inputs)


def routing(favour):
    """The made-up routing of section 1: rows of each of four ranks."""
    logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 2] += favour
    rows = torch.zeros(12, 8).scatter(1, logits.topk(2).indices, 1.0).sum(0)
    return [int(n) for n in rows.view(4, 2).sum(1)]


FAIR, FAVOURED = routing(0.0), routing(2.5)
EXAMPLE = {"tokens": 4, "h": 3, "experts": 4, "k": 2, "ep": 2, "element_size": 4}
BYTES = right("bytes_per_layer", **EXAMPLE)
OF_TWO = list(itertools.product(range(2), repeat=2))
DROP = [chosen for chosen in OF_TWO if len(set(chosen)) == 1]
SOFT = torch.tensor([2.0, 1.0]).softmax(0).tolist()
LARGEST = max((one for case in LAB["expected_drops"].cases for one in case.fixed), key=lambda one: one["tokens"])
SHARE = right("expected_drops", tokens=2, experts=2, k=1, factor=1.0)["dropped"]
ROUNDED = set(torch.tensor([3.14, 3.145]).bfloat16().tolist())


def going(*experts):
    return [[e in chosen for e in range(4)] for chosen in experts]


WAY = journey([going((1, 2), (1, 3), (1, 3)), going((0, 1), (0, 2), (0, 1))])


NEAR = [[0.9, 0.4, 0.2, 0.1], [0.7, 0.6, 0.5, 0.3], [0.8, 0.3, 0.1, 0.0]]
CHOSEN = right("machines", experts=12, k=6, machines=3, scores=torch.tensor([sum(NEAR, [])]), most=2)["near's map"]
CHOSEN = CHOSEN[0].nonzero().flatten().tolist()
PAIRS = right("machines", experts=4, k=2, machines=2, scores=torch.zeros(1, 4), most=1)["machines_of_a_token's result"]


def names(rows):
    return " ".join(row.name for row in rows)


def balanced(*probs):
    """The loss of two tokens over coeff, each token choosing the expert that it likes most."""
    logits = torch.tensor(probs).log()
    return right("balance", logits=logits, k=1, coeff=1.0)["loss"]


BOTH = right("balance", logits=torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log(), k=1, coeff=1.0)
GRADIENT = BOTH["gradient"][0].tolist()
EVEN = "coeff" if balanced([0.8, 0.2], [0.2, 0.8]) == pytest.approx(1) else "not coeff"
MOST = busiest([[12, 12, 0, 0, 0, 0, 0, 0]])[0]  # twelve tokens, k = 2: all of them choose the same two of eight


def factor(got, want):
    return right("suspects", got={"g": torch.tensor(got)}, want={"g": torch.tensor(want)})["`g`"]


TURNED = factor([0.0, 3.0], [3.0, 0.0])

STATED = [
    # the header, and section 1
    ("Together {} hours.", f"{sum(MINUTES.values()) // 60}"),
    ("| A | 1 The problem · 2 Predict | {} h |", f"{MINUTES['A'] // 60}"),
    ("| B | 3 Implement | {} h |", f"{MINUTES['B'] // 60}"),
    ("| C | 4 Run · 5 See | {} min |", f"{MINUTES['C']}"),
    ("| D | 6 Break it · 7 Explain | {} min |", f"{MINUTES['D']}"),
    ("In {} layers DeepSeek-V3 has", f"{sum(V3.expert_layers)} of its {V3.num_layers}"),
    ("DeepSeek-V3 has {} experts, and sends", f"{V3.num_experts}"),
    ("sends each token to {} of them", f"{V3.moe_router_topk}"),
    ("three quarters of them leave, {} bytes;", f"2 × {8 * 8 * 3 // 4} = {2 * 8 * 8 * 3 // 4}"),
    ("go to three ranks, {} bytes.", f"2 × {8 * 8 * 3} = {2 * 8 * 8 * 3}"),
    ("at 450 GB/s, rows would travel a {} as long", {9: "ninth"}[450 // 50]),
    ("the experts of DeepSeek-V3 alone need {} GPUs of 80 GB", f"{math.ceil(EXPERTS * 2 / 80e9)}"),
    ("with the whole table it would be {}.", f"{count_parameters(V3, active=True) / 1e9:.1f}"),
    ("An expert of DeepSeek-V3 is {} wide", f"{V3.moe_ffn_hidden_size}"),
    ("over 64 ranks that leaves {} columns", f"{V3.moe_ffn_hidden_size // 64}"),
    ("Each side has {} rows", f"{sum(FAIR)}" if sum(FAIR) == sum(FAVOURED) else "not as many"),
    ("rows, {} for each rank on average", f"{sum(FAIR) // 4}"),
    ("On the left that is rank {},", f"{FAIR.index(max(FAIR))}"),
    ("with {} rows, and this router has no favourite", f"{max(FAIR)}"),
    ("On the right it is rank {},", f"{FAVOURED.index(max(FAVOURED))}"),
    ("with {}: the layer takes twice as long", f"{max(FAVOURED)}" if max(FAVOURED) == 2 * 6 else "not twice"),
    # bytes
    ("a row has {} bytes", f"{3 * 4}"),
    ("A rank has k·T = {} rows", f"{2 * 4}"),
    ("so {} of them stay on this rank and 4 leave", f"{2 * 4 // 2}"),
    ("Together {} bytes. * *All-gather.*", f"{BYTES['alltoall']:.0f}"),
    ("each with 4 weights and 4 flags: 4 · ({}) bytes", f"{12} + {4 * 4} + {4}"),
    ("Back come 4 · 12. Together {} bytes.", f"{BYTES['allgather']:.0f}"),
    # drops
    ("In {} of the four cases", {2: "two"}[len(DROP)]),
    ("So the expected share is {}.", f"1/{1 / SHARE:.0f}"),
    ("of a run: {} tokens a rank", f"{LARGEST['tokens']}"),
    ("tokens a rank, {} experts.", f"{LARGEST['k']} of {LARGEST['experts']}"),
    # the router
    ("with weights softmax(2, 1) = {}.", f"{SOFT[0]:.2f} and {SOFT[1]:.2f}"),
    ("bf16, which keeps {} significant bits", f"{1 - int(math.log2(torch.finfo(torch.bfloat16).eps))}"),
    ("({} mantissa bits and a leading 1)", f"{-int(math.log2(torch.finfo(torch.bfloat16).eps))}"),
    ("{} decimal digits: 3.14", "two to three" if 2 < 8 * math.log10(2) < 3 else "other"),
    ("3.14 and 3.145 are {} number in bf16", {1: "the same", 2: "another"}[len(ROUNDED)]),
    # balance
    ("both prefer expert 0 | 2, 0 | {} |", f"{0.8 + 0.8:.1f}, {0.2 + 0.2:.1f}"),
    ("(2 · 1.6 + 0 · 0.4) = {} coeff |", f"{balanced([0.8, 0.2], [0.8, 0.2]):.1f}"),
    ("one prefers each | 1, 1 | 1, 1 | coeff · 2/4 · (1 · 1 + 1 · 1) = {} |", EVEN),
    ("the prices are [1, 0] coeff, a token pays {} coeff", f"{0.8 * 1 + 0.2 * 0}"),
    ("the gradient of its logits is {} coeff", f"[{', '.join(f'{x:.2f}' for x in GRADIENT)}]"),
    ("The sums are {}, so expert 1 is chosen", f"[{0.5 - 0.2:.1f}, {0.4 + 0:.1f}]"),
    ("0.4 / 0.4 = {}.", f"{0.4 / 0.4:.0f}"),
    # the journey
    ("its rows, by expert | {}, so `counts`", names(WAY.leaving[0])),
    ("so `counts` is {} |", f"{WAY.counts[0]}"),
    ("it sends | {} rows to rank 0, which is itself", f"{WAY.input_splits(0)[0]}"),
    ("which is itself, and {} to rank 1", f"{WAY.input_splits(0)[1]}"),
    ("it gets | {} rows from rank 0", f"{WAY.output_splits(0)[0]}"),
    ("rows from rank 0 and {} from rank 1", f"{WAY.output_splits(0)[1]}"),
    ("*output splits*; {}, then d0", names(WAY.arriving[0][:3])),
    ("then {} | | its experts want", names(WAY.arriving[0][3:])),
    ("its experts want | {} for expert 0", names(row for row in WAY.working[0] if row.expert == 0)),
    ("for expert 0, {} for expert 1", names(row for row in WAY.working[0] if row.expert == 1)),
    ("`blocks` | {}: `blocks[i, e]`", f"{WAY.blocks[0]}"),
    ("how does rank 0 learn that {} rows will come", f"{WAY.output_splits(0)[1]}"),
    ("When {} rows have come", {8: "eight"}[len(WAY.arriving[0])]),
    ("they are {} blocks, one of them empty", {4: "four"}[sum(map(len, WAY.blocks[0]))]),
    ("blocks, {} of them empty", {1: "one"}[sum(of.count(0) for of in WAY.blocks[0])]),
    # finish
    ("so N = {}. Their", f"{1 + 2 + 3 + 4}"),
    ("The right gradient is (1 + 3) / 10 = {}.", f"{(1 + 3) / 10}"),
    # see
    ("The busiest may have {} times its share", {4: "four"}[MOST]),
    ("it has moved by at most {} after 100 steps", f"{0.001 * 100:.1f}"),
    # machines
    ("8 machines of 8 GPUs, {} experts in each machine", f"{V3.num_experts // 8}"),
    ("in at most `most` = {} machines", f"{V3.moe_router_group_topk}"),
    ("Of the {} pairs, all equally likely, 2 lie", f"{math.comb(4, 2)}"),
    ("The mean is (2 · 1 + 4 · 2) / 6 = {}.", f"{PAIRS * 3:.0f}/3"),
    ("| scores | {} |", " | ".join(" ".join(map(str, one)) for one in NEAR)),
    ("| worth | {} |", " | ".join(f"{sum(one[:3]):.1f}" for one in NEAR)),
    ("| chosen | {}|", "0.9 0.4 | 0.7 0.6 0.5 0.3 | " if CHOSEN == [0, 1, 4, 5, 6, 7] else "other"),
    ("in bf16, 0.5 + 0.001 is {}.", f"{(torch.tensor(0.5).bfloat16() + 0.001).item()}"),
    ("Below 989 / 3.35 ≈ {} rows", f"{989 / 3.35:.0f}"),
    ("one token for each of 256 requests sends {} rows", f"{256 * V3.moe_router_topk // V3.num_experts}"),
    # break it
    ("got = [0.5, -0.5] has the factor {};", f"{factor([0.5, -0.5], [1.0, -1.0])}"),
    ("want = [3, 0] and got = [0, 3] has {}.", {True: "none", False: "one"}[math.isnan(TURNED)]),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "value"), STATED, ids=[sentence[:40] for sentence, _ in STATED])
def test_the_text_states_what_comes_out(sentence, value):
    assert sentence.format(value) in TEXT, f"the lab does not say: {sentence.format(value)}"


def test_what_a_token_uses_is_what_the_models_are_named_by():
    """The chart leaves out the input table; rounded, it is the number that is published."""
    used = {}
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"):
        config = TransformerConfig.from_dict(preset(name))
        used[name] = round((count_parameters(config, active=True) - config.vocab_size * config.hidden_size) / 1e9)
    assert used == {"mixtral-8x7b": 13, "qwen3-30b-a3b": 3, "qwen3-235b-a22b": 22, "deepseek-v3": 37}


def test_on_the_curves_the_two_ways_meet_where_as_many_ranks_are_as_choices():
    sent = {ep: right("bytes_per_layer", tokens=256, h=64, experts=8, k=2, ep=ep, element_size=4) for ep in (2, 4, 8)}
    ratio = {ep: ways["allgather"] / ways["alltoall"] for ep, ways in sent.items()}
    assert 1 < ratio[2] < 1.1 and 2 < ratio[4] < 2.2 and 4 < ratio[8] < 4.4


def test_of_rows_alone_an_all_gather_sends_p_over_k_times_as_many():
    sent = right("answers", **LAB["answers"].cases[0].inputs)
    assert sent["allgather_over_alltoall"] == pytest.approx(4 / 3), "ep 4, k = 3"


def test_without_a_bias_choosing_by_softmax_is_the_router():
    logits = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = logits.softmax(-1)
    right_bias = right("expert_bias", scores=scores, bias=torch.zeros(6), k=2, counts=torch.ones(6), rate=0.1)
    eye = torch.eye(6, dtype=torch.float64)
    right_route = right("route", x=logits, weight=eye, k=2, g=torch.ones(20, 6, dtype=torch.float64))
    torch.testing.assert_close(right_bias["probs"], right_route["probs"].float())
