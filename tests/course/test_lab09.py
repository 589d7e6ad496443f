"""Lab 09's checks and its language: what the judge takes for right, beside the package's and other people's code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tokenizers
from course.lab09 import language
from course.lab09.resumed import PARTS, logs
from tokenizers import models, pre_tokenizers, trainers

from labkit.exercises import Draw
from minimegatron.data.indices import build_sample_indices
from minimegatron.models.families import family_config
from minimegatron.optim.schedule import Schedule
from minimegatron.training.flops import step_flops
from tests.course.marked import LABS

LAB = LABS["09_training_end_to_end"].lab


def drawn(exercise: str, seed: int) -> Any:
    """The inputs of the last hidden case."""
    case = [case for case in LAB[exercise].cases if case.hidden][-1]
    return case.inputs(Draw(seed))  # type: ignore[operator]


def right(exercise: str, **inputs: Any) -> Any:
    reference = LAB[exercise].reference
    assert reference is not None
    return reference(**inputs)


@pytest.mark.parametrize("seed", range(2))
def test_flops_of_a_token_are_the_packages(seed: int) -> None:
    inputs = drawn("mfu", seed)
    m, s = inputs["model"], inputs["s"]
    config = family_config(
        "llama", num_layers=m["layers"], hidden_size=m["h"], num_attention_heads=m["a"], num_query_groups=m["g"],
        kv_channels=m["d"], ffn_hidden_size=m["f"], vocab_size=m["v"],
    )  # fmt: skip
    assert step_flops(config, 1, s) == pytest.approx(s * right("mfu", **inputs)["flops"])


@pytest.mark.parametrize("seed", range(20))
def test_epochs_are_those_that_the_package_lays_out(seed: int) -> None:
    inputs = drawn("epochs", seed)
    told, s = right("epochs", **inputs), inputs["s"]
    lengths = np.full(1, inputs["tokens"], np.int32)
    laid = build_sample_indices(lengths, np.arange(1), inputs["samples"], s, 1)
    assert (len(laid.document_index), len(laid.shuffle_index)) == (told["epochs"], told["samples"])
    if told["apart"]:  # its samples come last
        early = inputs["samples"] - told["needed"]
        assert set(laid.shuffle_index[:early].tolist()) == set(range(early))


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_of_a_sample_are_where_the_package_finds_them(seed: int) -> None:
    inputs = drawn("pieces", seed)
    lengths, s, i = np.array(inputs["lengths"], np.int32), inputs["s"], inputs["i"]
    laid = build_sample_indices(lengths, np.arange(len(lengths)), None, s, 1)
    held = right("pieces", lengths=lengths[laid.document_index].tolist(), s=s, i=i)
    (first, offset), (last, end) = laid.sample_index[i].tolist(), laid.sample_index[i + 1].tolist()
    stream = np.cumsum([0, *lengths[laid.document_index]])
    assert stream[held[0][0]] + held[0][1] == stream[first] + offset
    assert (held[-1][0], held[-1][2]) == (last, end + 1) and sum(z - a for _, a, z in held) == s + 1


@pytest.mark.parametrize("seed", range(30))
def test_rates_are_the_packages(seed: int) -> None:
    inputs = drawn("rate", seed)
    plan = inputs["plan"]
    schedule = Schedule(
        max_lr=plan["peak"], min_lr=plan["floor"], lr_warmup_steps=plan["warmup"], lr_decay_steps=plan["end"],
        lr_decay_style={"cosine": "cosine", "wsd": "WSD"}[plan["style"]], wsd_decay_steps=plan["fall"],
        lr_wsd_decay_style="minus_sqrt",
    )  # fmt: skip
    assert right("rate", **inputs) == pytest.approx(schedule.lr_at(inputs["n"]))


def test_rounds_of_merges_give_the_words_of_hugging_faces_trainer() -> None:
    """Words of which no two pairs are equally frequent in any round, so that no rule about ties decides."""
    counted = {"aab": 5, "ab": 9, "cab": 3, "bc": 2, "aabc": 1}
    words, counts, merges = [list(word) for word in counted], list(counted.values()), []
    for _ in range(5):
        pair, words = right("merge_round", words=words, counts=counts)
        merges.append("".join(pair))
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = sorted({letter for word in counted for letter in word})
    trainer = trainers.BpeTrainer(vocab_size=len(letters) + 5, initial_alphabet=letters, show_progress=False)
    fast.train_from_iterator([" ".join([word] * n) for word, n in counted.items()], trainer)
    assert {word for word in fast.get_vocab() if len(word) > 1} == set(merges)


@pytest.mark.parametrize("part", [*PARTS, ""])
def test_each_part_that_is_forgotten_leaves_a_trace_of_its_own(part: str) -> None:
    assert right("forgotten", **logs(11, part)) == (part or "nothing")


def test_the_entropy_of_the_language_is_that_of_its_stories() -> None:
    """The mean of -log p over stories, each word's chance looked up in the rules."""
    found, texts = [], language.stories(800)
    for text in texts:
        lines, nats = text.split("\n"), 0.0
        for line in lines:
            assert language.is_sentence(line)
            before = "."
            for part, word in enumerate(line.removesuffix(".").split(" ")):
                liked = language.order(before, part)
                nats -= math.log(language.chances(len(liked))[liked.index(word)])
                before = word
        goes_on = (len(lines) - 1) * math.log(language.GOES_ON) + math.log(1 - language.GOES_ON)
        found.append((nats - goes_on) / (7 * len(lines)))
    weights = [len(text.split("\n")) for text in texts]
    mean = sum(n * w for n, w in zip(found, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(language.nats_of_a_story() / language.tokens_of_a_story(), rel=0.01)
    assert not language.is_sentence("old sailor paints golden.") and not language.is_sentence(
        "sailor old paints red maps."
    )
