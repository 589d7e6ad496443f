"""Likelihoods of texts and of choices, against transformers' model with the same weights and plain sums."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.commands import evaluate
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import ConfigError, DataError
from minimegatron.evaluation.likelihood import (
    Likelihood,
    Question,
    Rows,
    engine_of,
    pair_ids,
    question_report,
    question_requests,
    read_questions,
    text_report,
    text_requests,
    windows,
)
from minimegatron.inference.generate import complete
from tests.inference.models import ours, theirs
from tests.inference.test_command import published

TEXT = "What is it that trains a model? Many numbers, and a little calculus; the rest is waiting for somebody else."


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_each_token_is_predicted_once_with_at_least_the_promised_context(length, longest, data):
    stride = data.draw(st.integers(1, longest - 1))
    found = list(windows(length, longest, stride))
    assert [i for _, start, end in found for i in range(start, end)] == list(range(1, length))
    for begin, start, end in found:
        assert 0 <= begin < start < end <= begin + longest
        assert all(at - begin >= min(at, longest - stride) for at in range(start, end))
    with pytest.raises(DataError, match="stride"):
        list(windows(length, longest, longest))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(published("llama2", tmp_path_factory.mktemp("words")), split_special_tokens=False)


def by_transformers(ids: list[int], start: int) -> tuple[float, bool]:
    """Log-probability of ids[start:], and whether each is the likeliest."""
    with torch.no_grad():
        logits = theirs("llama2")(torch.tensor([ids])).logits[0, start - 1 : -1].double()
    wanted = torch.tensor(ids[start:])
    return float(logits.log_softmax(-1).gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


def test_a_text_is_as_likely_as_transformers_finds_its_windows(tokenizer):
    engine = engine_of(ours("llama2"))
    engine.max_model_len = engine.scheduler.max_model_len = 24
    for stride in (None, 7):
        asked = text_requests(TEXT, tokenizer, Rows(engine.model.config, 24), stride)
        found = [Likelihood.of(answer) for (answer,) in complete(engine, asked)]
        ids = [96, *tokenizer.tokenize(TEXT)]
        assert sum(one.tokens for one in found) == len(ids) - 1
        total = at = 0.0
        at, step = 1, stride or 23
        while at < len(ids):
            end = min(at + step, len(ids))
            total += by_transformers(ids[max(0, end - 24) : end], at - max(0, end - 24))[0]
            at = end
        report = text_report(found, TEXT)
        assert report["loss"] == pytest.approx(-total / (len(ids) - 1), rel=1e-5)
        assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
        assert report["bits per byte"] == pytest.approx(-total / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_choices_are_as_likely_as_transformers_finds_them(tokenizer):
    questions = [Question("7 + 5 =", ("12", "11", "a hundred"), 0), Question("Who? ", ("I", "you"), 1)]
    engine = engine_of(ours("llama2"))
    asked = question_requests(questions, tokenizer, Rows(engine.model.config, 40))
    found = [Likelihood.of(answer) for (answer,) in complete(engine, asked)]
    at = iter(found)
    for each in questions:
        for choice in each.choices:
            before = tokenizer.tokenize(each.question.rstrip())
            ids = tokenizer.tokenize(f"{each.question} {choice}")
            log_prob, greedy = by_transformers(ids, len(before))
            one = next(at)
            assert one.log_prob == pytest.approx(log_prob, rel=1e-5) and one.greedy == greedy
            assert one.tokens == len(ids) - len(before)
    report = question_report(questions, found)
    assert report["questions"] == 2 and report["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_the_likeliest_choice_and_the_likeliest_for_its_length_are_counted():
    questions = [Question("q", ("long answer", "no"), 0), Question("q", ("yes", "nay"), 1)]
    values = [Likelihood(x, 1, False) for x in (-5.0, -4.0, -1.0, -2.0)]
    report = question_report(questions, values)
    assert report["acc"] == 0.0 and report["acc_norm"] == 0.5
    assert report["acc_norm_stderr"] == pytest.approx(math.sqrt(0.25))


def test_spaces_at_the_seam_belong_to_the_answer_and_an_empty_context_is_the_prefix(tokenizer):
    assert pair_ids("a ", "b", tokenizer) == pair_ids("a", " b", tokenizer)
    assert pair_ids("", "b", tokenizer) == ([96], tokenizer.tokenize("b", add_special_tokens=False))
    with pytest.raises(DataError, match="adds no token"):
        pair_ids("a", "", tokenizer)


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"question": "q", "choices": ["a"], "answer": 0}', "1 choices"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "answer is 2"),
        ('{"question": "q", "choices": ["a", ""], "answer": 0}', "no text"),
        ('{"question": "q", "answer": 0}', "choices"),
        ("", "no question"),
    ],
)
def test_a_line_that_is_no_question_is_refused_with_its_number(line, said, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"question": "q", "choices": ["a", "b"], "answer": 0}}\n{line}\n')
    with pytest.raises(DataError, match=f"(?s){said}.*line 2|line 2.*{said}"):
        read_questions(path)


def test_the_command_prints_figures_of_texts_and_choices(tmp_path):
    folder = published("llama2", tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    line = json.dumps({"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0})
    (tmp_path / "questions.jsonl").write_text(f"{line}\n")
    asked = [str(folder), "--text", f"{tmp_path}/text.txt", "--choices", f"{tmp_path}/questions.jsonl", "--json"]
    command = [sys.executable, "-m", "minimegatron", "evaluate", *asked]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    text, questions = map(json.loads, ran.stdout.splitlines())
    assert text["tokens"] == len(TEXT) + 1 and text["bytes"] == len(TEXT) and questions["acc"] in (0.0, 1.0)


def test_a_line_of_figures_says_how_the_text_was_cut(capsys):
    evaluate.show("t", {"tokens": 1234, "loss": 2.0}, ", windows of 23 tokens, 7 predicted", as_json=False)
    assert capsys.readouterr().out == "t: tokens 1,234, loss 2.0000, windows of 23 tokens, 7 predicted\n"


@pytest.mark.parametrize("more, said", [([], "nothing to evaluate"), (["--text", "t", "--limit", "3"], "goes with")])
def test_what_means_nothing_is_refused(more, said, capsys):
    with pytest.raises(ConfigError, match=said):
        evaluate.parse(["folder", *more])
