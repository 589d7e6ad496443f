"""A T5 behind the server: words, penalties, log-probabilities and texts are transformers'; what does not go is said."""

from __future__ import annotations

import json

import openai
import pytest
import torch

from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import RankError
from minimegatron.inference.engine import Engine, EngineConfig
from tests.inference.encoder_decoder import END, START, WORDS, ours, theirs, written
from tests.serving.conftest import running
from tests.serving.ranked import served

TEXTS = ["Who is it that knows?", "7 + 5 = ", "a", ""]
ENDS = {"ignore_eos": True, "stop_token_ids": [END]}
BLANK = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def t5(folder):
    engine = Engine(ours("1.1"), EngineConfig(max_model_len=64, page_size=4, max_num_seqs=4))
    with running(HuggingFaceTokenizer(folder, split_special_tokens=False), engine=engine) as server:
        server.folder = folder
        yield server
        assert server.engine.scheduler.blocks.available == 64, "pages are lost"


def said_by_transformers(folder, text, **options):
    """Ids and text of its greedy answer, and their log-probabilities."""
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(folder)
    source = torch.tensor([words(text)["input_ids"] if isinstance(text, str) else text])
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    made = theirs("1.1").generate(source, attention_mask=torch.ones_like(source), **options)[0]
    with torch.no_grad():
        logits = theirs("1.1")(input_ids=source, decoder_input_ids=made[None, :-1]).logits[0]
    log_probs = logits.log_softmax(-1).gather(1, made[1:, None])[:, 0]
    return made[1:].tolist(), words.decode(made, skip_special_tokens=True), log_probs.tolist()


def ask(server, prompt, **options):
    options = {"max_tokens": 12, "temperature": 0, **options}
    more = {**ENDS, **options.pop("extra_body", {})}
    return server.openai.completions.create(model="tiny", prompt=prompt, extra_body=more, **options)


def test_answers_are_those_of_transformers(t5):
    told = [said_by_transformers(t5.folder, text) for text in TEXTS]
    answer = ask(t5, TEXTS, logprobs=0)
    assert [choice.text for choice in answer.choices] == [text for _, text, _ in told] and len({*told[0][0]}) > 3
    for choice, (_, _, log_probs) in zip(answer.choices, told, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(log_probs, abs=1e-5)
    streamed = "".join(event.choices[0].text for event in ask(t5, TEXTS[0], stream=True))
    assert streamed == told[0][1]
    ids = [9, 40, 17, 17]
    answer = ask(t5, ids)
    assert answer.choices[0].text == said_by_transformers(t5.folder, ids)[1]
    assert answer.usage.prompt_tokens == len(ids) + 1, "ids as they are, and the start of the target"


def test_a_conversation_is_a_source(t5):
    messages = [{"role": "user", "content": "Who is it?"}]
    want = said_by_transformers(t5.folder, "Who is it? answer:")[1]
    options = {"max_tokens": 12, "temperature": 0, "extra_body": ENDS}
    answer = t5.openai.chat.completions.create(model="tiny", messages=messages, **options)
    assert answer.choices[0].message.content == want


def test_penalties_count_what_the_decoder_has(t5):
    answer = ask(t5, TEXTS[0], extra_body={"repetition_penalty": 1.7})
    with_source = said_by_transformers(t5.folder, TEXTS[0], encoder_repetition_penalty=1 / 1.7, repetition_penalty=1.7)
    assert answer.choices[0].text == said_by_transformers(t5.folder, TEXTS[0], repetition_penalty=1.7)[1]
    assert answer.choices[0].text not in (with_source[1], ask(t5, TEXTS[0]).choices[0].text), "the case says nothing"


def test_a_text_begins_without_the_blank_before_its_first_word(t5):
    letter = WORDS.index("b") + BLANK
    for word, count, want in ((BLANK, 1, ""), (letter, 2, "bb")):
        assert ask(t5, "ab", max_tokens=count, logit_bias={word: 100}).choices[0].text == want
    assert ask(t5, "ab", max_tokens=3, logit_bias={letter: 100}, stop="b").choices[0].text == ""


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {"echo": True}, "an answer does not continue it"),
        ("a", {"echo": True, "max_tokens": 0, "logprobs": 1}, "an answer does not continue it"),
        ("a<pad>b", {}, "token id 0 is decoder_start_token_id"),
        ([5, 0, 7], {}, "token id 0 is decoder_start_token_id"),
        ([5] * 60, {}, "context is 64 tokens; the prompt has 61"),
        ([5, 99], {}, "99 is not in a vocabulary"),
    ],
)
def test_what_is_no_source_is_refused(t5, prompt, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(t5, prompt, **options)


def test_two_ranks_answer_as_transformers(ranks, folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    bodies = [{"prompt": text, "max_tokens": 12, "temperature": 0} for text in TEXTS]
    answers, _ = ranks(2).run(served, [str(folder), "--port", "0", "--max-num-seqs", "2"], bodies)[0]
    told = [said_by_transformers(folder, text) for text in TEXTS]
    assert [answer["choices"][0]["text"] for answer in answers] == [text for _, text, _ in told]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--max-model-len", "600"], "max_model_len is 600, and a step has 512 tokens.*max_num_batched_tokens=600"),
        (["--speculative-config", '{"method": "ngram"}'], "it cannot go back to before a rejected token"),
        (["--lora-modules", "mine={adapter}"], "the adapter mine, and the model has none.*lora_rank"),
    ],
    ids=["length", "speculation", "adapters"],
)
def test_what_an_encoder_decoder_cannot_have_is_refused_before_it_serves(ranks, folder, tmp_path, more, says):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    import safetensors.torch

    weight = {"base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight": torch.zeros(2, 32)}
    safetensors.torch.save_file(weight, tmp_path / "adapter_model.safetensors")
    line = [str(folder), "--port", "0", *(word.replace("{adapter}", str(tmp_path)) for word in more)]
    with pytest.raises(RankError, match=f"(?s){says}"):
        ranks(1).run(served, line, [])


assert START == 0 and WORDS[0] == "\u2581", "the ids above"
