"""Exactly what the assistant spoke counts; templates and lines of which that cannot be said are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minimegatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from minimegatron.errors import ConfigError, DataError
from minimegatron.posttraining.conversations import Encoder, Template, Tokens
from minimegatron.posttraining.data import PLAIN

# As Qwen's, Llama's and Gemma's templates write a turn; `{% generation %}` is what transformers needs to find it.
CHATML = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAYS = "{{ m.content }}<|im_end|>{% endg"
FORGETFUL = CHATML.replace(SAYS, "{% if not loop.last %}...{% else %}{{ m.content }}{% endif %}<|im_end|>{% endg")
ENDLESS = CHATML.replace(SAYS, "{{ m.content }}{% endg")
LATE = ENDLESS.replace("<|im_start|>{{ m.role", "{% if not loop.first %}<|im_end|>{% endif %}<|im_start|>{{ m.role")
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4, of course"},
    {"role": "user", "content": "\n3 + 3?\n"},
    {"role": "assistant", "content": "\n\n6"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, with special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"ĊĊ": 256}, [("Ċ", "Ċ")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    fast.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder, split_special_tokens=False)


def counted(tokenizer: Any, sequence: Tokens) -> str:
    """The text of the tokens that count, special ones among them."""
    ids = [i for i, c in zip(sequence.ids, sequence.counts, strict=True) if c]
    return str(tokenizer._fast.decode(ids, skip_special_tokens=False))


def test_the_mask_is_that_of_transformers_on_a_marked_template(folder: Path, tokenizer: HuggingFaceTokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tools = [{"type": "function", "function": {"name": "add"}}]
    plain = [*TALK[:4], {"role": "assistant", "content": "6"}]
    for talk, given in ((plain, None), (TALK[:3], tools), (TALK[1:3], None)):
        said = oracle.apply_chat_template(
            talk, tools=given, chat_template=CHATML, return_dict=True, return_assistant_tokens_mask=True
        )
        found = Template(tokenizer, CHATML).encode(talk, tools=given)
        answers = "".join(f"{message['content']}<|im_end|>" for message in talk if message["role"] == "assistant")
        assert counted(tokenizer, found) == answers
        n = len(found.ids)  # what follows the last stop token is nobody's
        assert list(found.ids) == said["input_ids"][:n] and tokenizer.detokenize(said["input_ids"][n:]) == "\n"
        assert [int(c) for c in found.counts] == said["assistant_masks"][:n]
        assert ('"name": "add"' in tokenizer.detokenize(found.ids)) == (given is not None)


def test_a_prompt_is_what_a_server_would_be_asked(tokenizer: HuggingFaceTokenizer) -> None:
    template = Template(tokenizer, CHATML)
    prompt = Encoder(tokenizer, template).prompt({"prompt": TALK[:2]})
    whole = template.encode(TALK[:3])
    n = len(prompt)
    assert list(whole.ids[:n]) == prompt and whole.counts == (False,) * n + (True,) * (len(whole.ids) - n)


def test_an_answer_does_not_merge_with_what_opens_it(tokenizer: HuggingFaceTokenizer) -> None:
    """`assistant\\n` and `\\n\\n6` as one text have another first pair of newlines; a server's model never sees it."""
    template = Template(tokenizer, CHATML)
    prompt = Encoder(tokenizer, template).prompt({"prompt": TALK[:4]})
    found = template.encode(TALK)
    assert list(found.ids[: len(prompt)]) == prompt and set(found.counts[len(prompt) :]) == {True}
    assert list(found.ids) != tokenizer.tokenize(template.text(TALK, False), add_special_tokens=False)[: len(found.ids)]


def test_only_the_completion_of_messages_counts(tokenizer: HuggingFaceTokenizer) -> None:
    encoder = Encoder(tokenizer, Template(tokenizer, CHATML))
    (found,) = encoder.conversation({"prompt": TALK[:4], "completion": TALK[4:]})
    assert counted(tokenizer, found) == "\n\n6<|im_end|>"
    chosen, rejected = encoder.pair({"prompt": TALK[:2], "chosen": TALK[2:3], "rejected": TALK[4:]})
    assert [counted(tokenizer, one) for one in (chosen, rejected)] == ["4, of course<|im_end|>", "\n\n6<|im_end|>"]
    chosen, _ = encoder.pair({"chosen": TALK[:3], "rejected": [*TALK[:2], TALK[4]]})  # without a prompt: the last turn
    assert counted(tokenizer, chosen) == "4, of course<|im_end|>"


def test_texts_are_joined_and_ended() -> None:
    tokenizer = ByteTokenizer()
    (found,) = Encoder(tokenizer, None).conversation({"prompt": "2+2=", "completion": "4"})
    assert found == Tokens((*b"2+2=4", 256), (False,) * 4 + (True,) * 2)


def test_the_plain_template_serves_a_tokenizer_of_one_special_token(tokenizer: HuggingFaceTokenizer) -> None:
    found = Template(tokenizer, PLAIN, "plain").encode(TALK[1:3])
    assert counted(tokenizer, found) == "4, of course<|endoftext|>"


REFUSED = [
    (FORGETFUL, {"messages": TALK}, "differently once the turn is there"),
    (ENDLESS, {"messages": TALK[:3]}, "never learn to stop"),
    (LATE, {"messages": TALK[:3]}, "cannot be derived"),  # the stop token belongs to the next turn
    (CHATML, {"messages": TALK[:2]}, "no message of the assistant"),
    (CHATML, {"messages": [{"role": "user", "content": "a<|im_end|>"}, TALK[2]]}, "special token '<|im_end|>'"),
    (CHATML, {"messages": []}, "not a list of messages"),
    (CHATML, {"messages": [{"content": "a"}]}, "has no role"),
    (CHATML, {"text": "a"}, "a line with the keys 'text'"),
]


@pytest.mark.parametrize(("template", "line", "said"), REFUSED)
def test_what_is_refused(tokenizer: HuggingFaceTokenizer, template: str, line: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said.replace("|", r"\|")) as caught:
        Encoder(tokenizer, Template(tokenizer, template)).conversation(line)
    assert "fix: " in str(caught.value)


def test_equal_answers_and_missing_templates_are_refused(tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(DataError, match="are the same"):
        Encoder(ByteTokenizer(), None).pair({"prompt": "a", "chosen": "b", "rejected": "b"})
    with pytest.raises(ConfigError, match="no chat template"):
        Encoder(ByteTokenizer(), None).conversation({"messages": TALK})
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        Template(tokenizer)
