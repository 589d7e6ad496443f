"""OpenAI's client, unmodified: what is streamed is what is not, and both are the model's."""

from __future__ import annotations

import concurrent.futures
import json
import math
import re
import sys

import jsonschema
import openai
import pytest
import torch

from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from tests.inference.models import ours, theirs
from tests.serving.conftest import EOS

ASK = [{"role": "user", "content": "WHO "}, {"role": "assistant", "content": "ME"}, {"role": "user", "content": "a€"}]


def whole(tokenizer, ids, length, params=GREEDY, seed=0):
    """The text of the engine's own answer."""
    made = generate(ours("llama2"), [ids], length, params, stop_ids=[EOS], seed=seed)[0]
    return tokenizer.detokenize([*ids, *made.tokens])[len(tokenizer.detokenize(ids)) :], made


def streamed(chunks):
    """(text, finish reason) of each answer, and the usage."""
    texts, reasons, usage = {}, {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "something follows the end"
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return [(texts[i], reasons[i]) for i in sorted(texts)], usage


def test_a_completion_is_the_engines_streamed_or_not(tiny, tokenizer):
    create = tiny.openai.completions.create
    prompts = ["HELLO", "<bos><ask>a€", "B" * 17]
    ids = [tokenizer.tokenize(p, add_special_tokens=not p.startswith("<bos>")) for p in prompts]
    assert ids[1][0] == EOS + 1 != ids[1][1], "the text begins once"
    for temperature, params in ((0, GREEDY), (0.8, SamplingParams(0.8, top_p=0.9))):
        options = {"model": "tiny", "max_tokens": 20, "temperature": temperature, "top_p": 0.9, "seed": 7}
        wanted = [whole(tokenizer, each, 20, params, seed=7) for each in ids]
        for prompt in (prompts, ids):
            answer = create(prompt=prompt, **options)
            assert [choice.text for choice in answer.choices] == [text for text, _ in wanted]
        count = sum(len(made.tokens) for _, made in wanted)
        assert answer.usage.completion_tokens == count and answer.usage.prompt_tokens == sum(map(len, ids))
        chunks = list(create(prompt=prompts, stream=True, stream_options={"include_usage": True}, **options))
        found, usage = streamed(chunks)
        assert found == [(choice.text, choice.finish_reason) for choice in answer.choices]
        assert usage.completion_tokens == count and chunks[-1].choices == [] and chunks[-2].usage is None
        assert len({chunk.id for chunk in chunks}) == 1 and answer.model == chunks[0].model == "tiny"


def test_a_chat_is_the_templates_conversation(tiny, tokenizer):
    create = tiny.openai.chat.completions.create
    ids = tokenizer.tokenize(tokenizer.apply_chat_template(ASK), add_special_tokens=False)
    text, made = whole(tokenizer, ids, 64 - len(ids))
    parts = [{**ASK[0], "content": [{"type": "text", "text": "WH"}, {"type": "text", "text": "O "}]}, *ASK[1:]]
    for messages in (ASK, parts):
        answer = create(model="tiny", messages=messages, temperature=0)
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and choice.message.content == text
        assert choice.finish_reason == ("stop" if made.stopped else "length")
    chunks = list(create(model="tiny", messages=ASK, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and all(chunk.usage is None for chunk in chunks)
    assert streamed(chunks)[0] == [(text, choice.finish_reason)]
    end = text[4:6]
    with tiny.openai.chat.completions.stream(model="tiny", messages=ASK, temperature=0, stop=end) as events:
        assert events.get_final_completion().choices[0].message.content == text[: text.find(end)]


def test_answers_to_one_seed_are_others_and_the_same_again_whoever_is_beside(tiny, tokenizer):
    create = tiny.openai.completions.create
    ids = tokenizer.tokenize("SEED")

    def ask(n, seed, prompt="SEED", **more):
        answer = create(model="tiny", prompt=prompt, n=n, seed=seed, max_tokens=12, **more)
        return [choice.text for choice in answer.choices]

    three = ask(3, 11)
    assert three[0] == whole(tokenizer, ids, 12, SamplingParams(), seed=11)[0] and len(set(three)) == 3
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, 1, None, f"OTHER{i}") for i in range(3)]
        mine = pool.submit(ask, 1, 11)
        assert mine.result(30) == three[:1] and all(other.result(30) for other in others)
    chunks = create(model="tiny", prompt="SEED", n=3, seed=11, max_tokens=12, stream=True)
    assert [text for text, _ in streamed(chunks)[0]] == three
    assert len({*ask(1, None), *ask(1, None), *ask(1, None)}) > 1, "without a seed it is another each time"
    assert create(model="tiny", prompt="SEED", seed=11, max_tokens=12, stop=[three[0][2:4]]).choices[0].text in three[0]


def test_the_best_of_several(tiny):
    create, common = tiny.openai.completions.create, {"model": "tiny", "prompt": "B", "seed": 3, "max_tokens": 6}
    four = create(n=4, logprobs=0, **common).choices
    mean = {choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in four}
    best = create(n=2, best_of=4, **common)
    assert [choice.text for choice in best.choices] == sorted(mean, key=mean.get, reverse=True)[:2]
    assert [choice.index for choice in best.choices] == [0, 1] and best.choices[0].logprobs is None
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in four)


def test_a_stop_string_ends_the_text_and_the_work(tiny, tokenizer):
    create = tiny.openai.completions.create
    text, _ = whole(tokenizer, tokenizer.tokenize("STOP"), 24)
    assert len(text) > 9
    for stop in (text[3], text[2:5], [text[6:9], "never there"], text[-3:] + "x"):
        options = {"model": "tiny", "prompt": "STOP", "max_tokens": 24, "temperature": 0, "stop": stop}
        first = stop if isinstance(stop, str) else stop[0]
        (choice,) = create(**options).choices
        at = text.find(first)
        assert choice.text == (text[:at] if at >= 0 else text), stop
        assert choice.finish_reason == ("stop" if at >= 0 else "length")
        assert streamed(create(stream=True, **options))[0] == [(choice.text, choice.finish_reason)]
        if at >= 0:
            kept = create(extra_body={"include_stop_str_in_output": True}, **options)
            assert kept.choices[0].text == text[:at] + first and kept.usage.completion_tokens < 24


def test_log_probabilities_are_the_models_own(tiny, tokenizer):
    """Teacher-forced by Hugging Face, whatever the temperature; of the prompt too, and in both endpoints' forms."""
    create = tiny.openai.completions.create
    ids = tokenizer.tokenize("LOGS", add_special_tokens=False)
    common = {"model": "tiny", "prompt": ids, "seed": 1, "temperature": 0.6, "extra_body": {"ignore_eos": True}}
    answer = create(logprobs=3, max_tokens=8, echo=True, **common).choices[0]
    said = answer.logprobs
    made = generate(ours("llama2"), [ids], 8, SamplingParams(0.6), seed=1)[0].tokens
    every = torch.tensor([[*ids, *made]])
    logits = theirs("llama2")(every).logits[0].log_softmax(-1)
    want = [logits[i, token].item() for i, token in enumerate(every[0, 1:])]
    assert said.token_logprobs[0] is None and said.token_logprobs[1:] == pytest.approx(want, abs=1e-4)
    best = logits[-2].topk(3).values.tolist()
    assert sorted(said.top_logprobs[-1].values(), reverse=True)[:3] == pytest.approx(best, abs=1e-4)
    assert answer.text == tokenizer.detokenize(every[0].tolist()) and said.text_offset[:5] == [0, 1, 2, 3, 4]
    chunks = [c.choices[0] for c in create(logprobs=3, max_tokens=8, echo=True, stream=True, **common) if c.choices]
    assert "".join(c.text for c in chunks) == answer.text
    assert [t for c in chunks if c.logprobs for t in c.logprobs.token_logprobs] == said.token_logprobs
    alone = create(logprobs=0, max_tokens=0, echo=True, **common)
    assert alone.choices[0].text == "LOGS" and alone.choices[0].logprobs.token_logprobs == said.token_logprobs[:4]
    assert alone.usage.completion_tokens == 0
    begun = create(logprobs=0, max_tokens=0, echo=True, **{**common, "prompt": "LOGS"}).choices[0]
    assert begun.text == "LOGS" and begun.logprobs.tokens == ["<bos>", *"LOGS"]
    assert begun.logprobs.text_offset == [0, 0, 1, 2, 3]

    chat = tiny.openai.chat.completions.create
    asked = {"model": "tiny", "messages": ASK, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    found = chat(**asked).choices[0]
    shown = b"".join(bytes(entry.bytes) for entry in found.logprobs.content if entry.token != "<eos>")
    assert shown.decode(errors="replace") == found.message.content
    for entry in found.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token and entry.logprob == pytest.approx(
            entry.top_logprobs[0].logprob
        )
        assert math.exp(entry.logprob) <= 1 and len(entry.top_logprobs) == 2
    pieces = [c.choices[0].logprobs for c in chat(stream=True, **asked) if c.choices]
    assert [e for p in pieces if p for e in p.content] == found.logprobs.content


def test_penalties_and_biases_change_what_is_drawn(tiny, tokenizer):
    create = tiny.openai.completions.create
    common = {"model": "tiny", "prompt": "BIAS", "max_tokens": 6, "temperature": 0}
    a = tokenizer.tokenize("a", add_special_tokens=False)[0]
    assert create(logit_bias={str(a): 100}, **common).choices[0].text == "aaaaaa"
    less = create(logit_bias={str(a): 100}, frequency_penalty=2, presence_penalty=2, **common)
    assert less.choices[0].text == "aaaaaa", "100 outweighs 6 * 2 + 2"
    ends = create(logit_bias={str(EOS): 100}, **common)
    assert (ends.choices[0].text, ends.choices[0].finish_reason, ends.usage.completion_tokens) == ("", "stop", 1)
    later = create(logit_bias={str(EOS): 100}, extra_body={"min_tokens": 3}, **common)
    assert later.usage.completion_tokens == 4
    other = create(logit_bias={str(a): 100}, extra_body={"stop_token_ids": [a]}, **common)
    assert (other.choices[0].text, other.choices[0].finish_reason) == ("", "stop")


PERSON = {
    "type": "object",
    "properties": {
        "NAME": {"type": "string", "pattern": "^[A-N]{1,3}$"},
        "AGE": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["NAME", "AGE"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_answers_keep_to_a_schema(tiny):
    """In chats and completions, streamed or not, several at once; log-probabilities are the model's own."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    options = {"model": "tiny", "max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2, "extra_body": {"min_p": 0.01}}
    chat = {**options, "messages": ASK, "response_format": form}
    made = tiny.openai.chat.completions.create(**chat, logprobs=True)
    text = {**options, "prompt": "A", "extra_body": {"response_format": form}}
    completion = tiny.openai.completions.create(**text)
    texts = [*(choice.message.content for choice in made.choices), *(choice.text for choice in completion.choices)]
    for each, choice in zip(texts, [*made.choices, *completion.choices], strict=True):
        jsonschema.validate(json.loads(each), PERSON)
        assert choice.finish_reason == "stop"
    assert len(set(texts)) > 1 and all(entry.logprob < 0 for entry in made.choices[0].logprobs.content)
    found, _ = streamed(tiny.openai.chat.completions.create(**chat, stream=True))
    assert [each for each, _ in found] == texts[:2]
    plain = tiny.openai.completions.create(
        **{**options, "prompt": "A", "extra_body": {"response_format": {"type": "text"}}}
    )
    assert [choice.text for choice in plain.choices] != texts[2:]


@pytest.mark.parametrize(
    "asked, pattern",
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"json": {"enum": ["A", 12]}}}, '"A"|12'),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
        ({"structured_outputs": {"regex": "[AB]{3}"}}, "[AB]{3}"),
        ({"structured_outputs": {"choice": ["YES", "NO"]}}, "YES|NO"),
        ({"structured_outputs": {"grammar": 'start: "A" b\nb: "B" | "C"'}}, "A[BC]"),
    ],
    ids=str,
)
def test_what_bounds_an_answer(tiny, asked, pattern):
    for seed in range(3):
        options = {"model": "tiny", "prompt": "A", "max_tokens": 20, "temperature": 1.5, "seed": seed}
        text = tiny.openai.completions.create(**options, extra_body=asked).choices[0].text
        assert re.fullmatch(pattern, text, re.DOTALL), text


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}


@pytest.mark.parametrize(
    "asked, says",
    [
        ({"response_format": SCHEMA}, "Invalid type: foo"),
        ({"response_format": {"type": "json_schema"}}, "the type json_schema and the field `json_schema`"),
        ({"response_format": {**SCHEMA, "type": "text"}}, "the type json_schema and the field `json_schema`"),
        ({"response_format": {"type": "grammar"}}, "Input should be"),
        ({"response_format": {**SCHEMA, "json_schema": {"name": "a"}}}, "Field required"),
        ({"structured_outputs": {}}, "one of json, json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of json, json_object"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "one of the two"),
        ({"guided_json": {}}, 'say `structured_outputs`: {"json": ...}'),
    ],
    ids=str,
)
def test_what_bounds_no_answer_is_refused_by_name(tiny, asked, says):
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as error:
            tiny.openai.completions.create(model="tiny", prompt="A", stream=stream, extra_body=asked)
        assert says in error.value.message and error.value.param in asked


def test_without_its_package_a_grammar_is_refused_with_the_line_that_installs_it(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = {"structured_outputs": {"choice": ["NEW"]}}
    with pytest.raises(openai.BadRequestError, match=r"pip install 'minimegatron\[structured\]'"):
        tiny.openai.completions.create(model="tiny", prompt="A", extra_body=asked)
