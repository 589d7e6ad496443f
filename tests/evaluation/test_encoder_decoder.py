"""Texts and choices are as likely to a T5 as transformers finds them: the context in the encoder, the rest decoded."""

from __future__ import annotations

import contextlib
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.commands import evaluate
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import DataError
from minimegatron.evaluation.likelihood import (
    Likelihood,
    Question,
    Rows,
    engine_of,
    pair_ids,
    pair_request,
    question_requests,
    text_report,
    text_requests,
    windows,
)
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete
from minimegatron.models.families import family_config
from tests.inference.encoder_decoder import END, START, ours, theirs, written
from tests.inference.models import ours as decoder
from tests.models.test_t5 import ours_of, theirs_of

TEXT = "What is it that trains a model? Many numbers, and a little calculus: the rest is waiting for somebody else."
QUESTIONS = [Question("7 + 5 =", ("12", "11", "a hundred"), 0), Question("Who? ", ("I", "you"), 1)]
CONFIG = ours("1.1").config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HuggingFaceTokenizer(folder, split_special_tokens=False)


def by_transformers(source: list[int], target: list[int], model) -> tuple[float, bool]:
    """Log-probability of a target, and whether each word of it is the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([source]), decoder_input_ids=torch.tensor([[START, *target[:-1]]])).logits[0]
    wanted = torch.tensor(target)
    return float(logits.log_softmax(-1).gather(1, wanted[:, None]).sum()), bool((logits.argmax(-1) == wanted).all())


def both(precision: str):
    """(our model, theirs, how far apart a sum may be)."""
    if precision == "fp64":
        return ours_of(theirs_of("1.1")).eval(), theirs_of("1.1").model, 1e-9
    return ours("1.1"), theirs("1.1"), 1e-5


def found_by(model, requests, longest):
    engine = Engine(model, EngineConfig(longest, max_num_seqs=4, page_size=4))
    return [Likelihood.of(answer) for (answer,) in complete(engine, requests)]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_text_is_predicted_from_what_the_encoder_reads(tokenizer, precision):
    mine, model, tolerance = both(precision)
    rows = Rows(mine.config, 41)
    ids = [END, *tokenizer.tokenize(TEXT)]
    for stride in (None, 7):
        found = found_by(mine, text_requests(TEXT, tokenizer, rows, stride), 41)
        total, at, step = 0.0, 1, stride or 20
        while at < len(ids):
            end = min(at + step, len(ids))
            total += by_transformers(ids[max(0, end - 40) : at], ids[at:end], model)[0]
            at = end
        report = text_report(found, TEXT)
        assert report["tokens"] == len(ids) - 1
        assert report["loss"] == pytest.approx(-total / (len(ids) - 1), abs=tolerance)
        assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_choice_is_predicted_from_its_question_in_the_encoder(tokenizer, precision):
    mine, model, tolerance = both(precision)
    found = iter(found_by(mine, question_requests(QUESTIONS, tokenizer, Rows(mine.config, 81)), 81))
    for each in QUESTIONS:
        source = tokenizer.tokenize(each.question.rstrip())
        assert source[-1] == END
        for choice in each.choices:
            blank = each.question[len(each.question.rstrip()) :]
            target = tokenizer.tokenize(f"{blank} {choice}", add_special_tokens=False)
            log_prob, greedy = by_transformers(source, target, model)
            one = next(found)
            assert one.log_prob == pytest.approx(log_prob, abs=tolerance * len(target))
            assert (one.greedy, one.tokens) == (greedy, len(target))


def test_an_answer_that_is_greedy_says_so(tokenizer):
    source = tokenizer.tokenize("Who is it?")
    made = theirs("1.1").generate(torch.tensor([source]), max_new_tokens=5, do_sample=False)[0, 1:].tolist()
    other = [*made[:-1], made[-1] - 1]
    rows = Rows(CONFIG, 41)
    found = found_by(ours("1.1"), [pair_request(source, answer, rows) for answer in (made, other)], 41)
    assert [one.greedy for one in found] == [True, False]


def test_a_question_ends_as_in_training_and_an_empty_one_is_the_prefix(tokenizer):
    def words(text, add_special_tokens=None):
        return [*map(ord, text)]

    plain = SimpleNamespace(tokenize=words, eod=END, bos=None)
    assert pair_ids("ab", "c", plain, halves=True) == ([97, 98, END], [99])
    assert pair_ids("", "c", plain, halves=True) == ([END], [99])
    assert pair_ids("ab ", "c", plain, halves=True) == ([97, 98, END], [32, 99])
    with pytest.raises(DataError, match="adds no token"):
        pair_ids("ab", "", tokenizer, halves=True)


@given(st.integers(3, 40), st.integers(2, 90), st.data())
def test_each_half_has_the_models_positions(longest, length, data):
    rows = Rows(CONFIG, longest)
    assert rows.halves and rows.room == longest - 1 and 2 * rows.most in (rows.room, rows.room - 1)
    stride = data.draw(st.integers(1, rows.room - 1))
    for begin, start, end in windows(length, rows.room, stride):
        assert start - begin >= 1 and end - begin + 1 <= longest
    count = data.draw(st.integers(1, rows.most))
    request = pair_request([*range(5, 95)], [*range(5, 5 + count)], rows)
    assert len(request.prompt) <= longest and request.prompt[request.prompt_log_probs_start - 1] == START
    assert 1 <= request.prompt_log_probs_start - 1 <= rows.most
    assert request.prompt[0] == 95 - (request.prompt_log_probs_start - 1), "cut from the left"
    with pytest.raises(DataError, match=f"at most {rows.most} fit"):
        pair_request([5], [5] * (rows.most + 1), rows)
    of_decoder = Rows(decoder("llama2").config, longest)
    assert (of_decoder.halves, of_decoder.room, of_decoder.most) == (False, longest, longest - 1)
    assert of_decoder.context(count) == longest - count


def test_an_engine_has_room_for_both_halves():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99}
    config = family_config("t5", **sizes, max_position_embeddings=24)
    assert engine_of(ours_of(theirs_of("1.1"), max_position_embeddings=24).eval()).max_model_len == 49
    assert Rows(config, 49).most == 24


def printed(rank, world, argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        evaluate.evaluate(evaluate.parse(argv))
    return out.getvalue()


def test_the_command_prints_the_objective(ranks, folder, tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    line = json.dumps({"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0})
    (tmp_path / "questions.jsonl").write_text(f"{line}\n")
    argv = [str(folder), "--text", f"{tmp_path}/text.txt", "--choices", f"{tmp_path}/questions.jsonl", "--stride", "9"]
    text, questions = ranks(2).run(printed, argv)[0].splitlines()
    engine = engine_of(ours("1.1"))
    rows = Rows(CONFIG, engine.max_model_len)
    assert rows.most == CONFIG.max_position_embeddings
    found = complete(engine, text_requests(TEXT, tokenizer, rows, 9))
    want = text_report([Likelihood.of(answer) for (answer,) in found], TEXT)
    assert f"loss {want['loss']:.4f}" in text and "questions 1" in questions
    assert text.endswith("9 predicted by the decoder, those before them in the encoder")


@pytest.mark.thorough
def test_the_harness_has_the_same_numbers_as_with_transformers(tmp_path):
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    from lm_eval.models.huggingface import HFLM

    from minimegatron.evaluation.lm_eval import Harness

    folder = written(tmp_path, "1.0")  # lm-eval ties every head after loading
    other = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4, max_length=32)
    assert other.backend == "seq2seq"
    engine = engine_of(ours("1.0"))
    engine.max_model_len = engine.scheduler.max_model_len = 65
    mine = Harness(engine, HuggingFaceTokenizer(folder, split_special_tokens=False))

    def asked(*args):
        return SimpleNamespace(args=args)

    pairs = [asked("Who is it", " that knows?"), asked("", "A text"), asked("many words " * 6, "end"), asked("a ", "b")]
    for (value, greedy), (want, also) in zip(mine.loglikelihood(pairs), other.loglikelihood(pairs), strict=True):
        assert value == pytest.approx(want, rel=1e-4) and greedy == also
    texts = [asked("A text that is longer than one window of thirty two letters, by far."), asked("short")]
    found = zip(mine.loglikelihood_rolling(texts), other.loglikelihood_rolling(texts), strict=True)
    assert all(value == pytest.approx(want, rel=1e-4) for value, want in found)
    prompts = [
        asked(text, {"until": ["</s>"], "max_gen_toks": 8, "do_sample": False}) for text in ("Go on", "Who?", "7")
    ]
    made = mine.generate_until(prompts)
    for text, longer in zip(made, other.generate_until(prompts), strict=True):  # theirs counts the source as well
        assert longer.startswith(text)
    assert any(made)
