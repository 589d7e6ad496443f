"""`minimegatron generate`: how words are drawn, where the text ends, and what special tokens of a prompt become."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch

from minimegatron.checkpoint.companions import stop_ids
from minimegatron.commands.generate import parse, read_prompt, sampling_params
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from tests.inference.models import ours, theirs
from tests.inference.ranked import asked

LETTERS = [*map(chr, range(32, 127)), "<eos>", "<1>", "<2>", "<3>"]  # 99, as many as the model has


@pytest.fixture
def llama2(tmp_path):
    """A published folder whose tokenizer has a word a character, and three tokens for conversations."""
    theirs("llama2").save_pretrained(tmp_path)
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(LETTERS)}, "?"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(LETTERS[95:])
    first = tokenizers.processors.TemplateProcessing(single="<1> $A", special_tokens=[("<1>", 96)])
    fast.post_processor = first
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": "<1>", "tokenizer_class": "PreTrainedTokenizerFast"}
    template = "{{ bos_token }}{% for m in messages %}<2>{{ m.content }}<3>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_the_last_word_is_the_one_that_the_files_say(llama2):
    """generation_config.json over config.json, one id or several, as in transformers; then the tokenizer."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((llama2 / "config.json").read_text())
    words = generate(ours("llama2"), [[5, 9, 3]], 8)[0].tokens
    early = words[0]
    late = next(word for word in words if word != early)  # two that end the text at two places
    ids = torch.tensor([[5, 9, 3]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    cases = [
        ({"eos_token_id": [late, 98]}, early, "generation_config.json"),
        ({"eos_token_id": [late, early]}, None, "generation_config.json"),
        ({"eos_token_id": late}, early, "generation_config.json"),
        (None, late, "config.json"),
        (None, [98, early], "config.json"),
    ]
    for generation, model, who in cases:
        (llama2 / "config.json").write_text(json.dumps(config | {"eos_token_id": model}))
        (llama2 / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (llama2 / "generation_config.json").write_text(json.dumps(generation))
        oracle = transformers.AutoModelForCausalLM.from_pretrained(llama2)
        stops, said = stop_ids(llama2, 95, 99)
        made = generate(ours("llama2"), [[5, 9, 3]], 8, stop_ids=stops)[0]
        assert made.tokens == oracle.generate(ids, **options)[0, 3:].tolist() and said == who and made.stopped
    (llama2 / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert stop_ids(llama2, 95, 99) == ([95], "the tokenizer")
    for wrong in (99, -1, "2", [2, 99], True):
        (llama2 / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(CheckpointError, match="is not in a vocabulary of 99") as error:
            stop_ids(llama2, 95, 99)
        assert "--stop-token-ids" in error.value.fix


def test_the_command_stops_where_it_is_told(ranks, llama2):
    line = [str(llama2), "Once", "--max-new-tokens", "6"]
    (llama2 / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    ((_, refused), (text, said)) = ranks(1).run(asked, [line, [*line, "--stop-token-ids"]])[0]
    assert refused.startswith("CheckpointError: eos_token_id is 99") and "(6 tokens, no stop token among them" in said
    third = LETTERS.index(text[len("Once") + 2])
    (llama2 / "generation_config.json").write_text(json.dumps({"eos_token_id": [98, third]}))
    lines = [line, [*line, "--stop-token-ids", "98", str(third)]]
    answers = ranks(1).run(asked, lines)[0]
    for who, (text, said) in zip(("generation_config.json", "--stop-token-ids"), answers, strict=True):
        assert f"ended by {third}, a stop token of {who}" in said and len(text) <= len("Once") + 4


def test_a_value_that_is_the_default_counts_as_given(ranks, llama2):
    """Each flag that draws does so at its neutral value too; nothing but its absence is greedy."""
    line = [str(llama2), "Once", "--max-new-tokens", "12", "--stop-token-ids"]
    neutral = ("--temperature", "1.0"), ("--top-k", "0"), ("--top-p", "0.0"), ("--top-p", "1")
    lines = [[*line, *flag, "--seed", seed] for flag in neutral for seed in ("1", "2")]
    (greedy, said), *drawn = ranks(1).run(asked, [[*line, "--seed", "0"], *lines])[0]
    assert "--seed 0 changes nothing" in said
    assert [text for text, _ in drawn] == [drawn[0][0], drawn[1][0]] * 4, "all words, with a seed's own numbers"
    assert len({greedy, drawn[0][0], drawn[1][0]}) == 3
    assert sampling_params(parse(["f", "p"])) == sampling_params(parse(["f", "p", "--top-k", "1"])) == GREEDY
    assert sampling_params(parse(["f", "p", "--temperature", "1.0"])) == SamplingParams()


def test_special_tokens_of_a_prompt(llama2):
    """Read as tokens unless they shall be letters; bos once, where the prompt begins with it; both said."""

    def ids(*words):
        args = parse(["folder", *words])
        return read_prompt(args, HuggingFaceTokenizer(llama2, split_special_tokens=args.split_special_tokens))

    letters = [LETTERS.index(letter) for letter in "<2>a"]
    found, notes = ids("<2>a")
    assert found == [96, 97, letters[-1]]
    assert notes == ["the prompt spells special tokens (<2> 1), read as tokens; --split-special-tokens reads letters"]
    found, notes = ids("<2>a", "--split-special-tokens")
    assert found == [96, *letters] and "read as letters; --no-split-special-tokens" in notes[0]
    found, notes = ids("<1><2>a")
    assert found == [96, 97, letters[-1]] and "begins with <1>, so no other is put before it" in notes[1]
    assert ids("<1>a", "--add-special-tokens")[0][:2] == [96, 96]
    assert ids("a", "--no-add-special-tokens") == ([letters[-1]], [])
    assert ids("a") == ([96, letters[-1]], [])


def test_a_question_in_the_models_own_form(ranks, llama2):
    """The template's ids are those of transformers; only the answer is printed."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(llama2)
    want = oracle.apply_chat_template([{"role": "user", "content": "Who?"}], return_dict=False)
    args = parse(["folder", "Who?", "--chat"])
    assert read_prompt(args, HuggingFaceTokenizer(llama2, split_special_tokens=False)) == (want, [])
    notes = read_prompt(parse(["folder", "<2>", "--chat"]), HuggingFaceTokenizer(llama2, split_special_tokens=False))[1]
    assert notes == ["the prompt spells special tokens (<2> 1), read as tokens"]
    words = generate(ours("llama2"), [want], 6, stop_ids=[2])[0].tokens
    line = [str(llama2), "Who?", "--chat", "--max-new-tokens", "6"]
    assert ranks(1).run(asked, [line])[0][0][0] == oracle.decode(words, skip_special_tokens=True) + "\n"
    (llama2 / "chat_template.jinja").unlink()
    assert ranks(1).run(asked, [line])[0][0][1].startswith("ConfigError: the tokenizer has no chat template")


@pytest.mark.parametrize(
    "words, says",
    [
        (["--chat", "--split-special-tokens"], "the template spells all special tokens itself"),
        (["--chat", "--no-add-special-tokens"], "the template spells all special tokens itself"),
        (["--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["--topk", "3"], "unrecognized arguments: --topk 3"),
    ],
    ids=str,
)
def test_a_wrong_line_is_answered_in_three(words, says):
    with pytest.raises(ConfigError) as error:
        parse(["folder", "prompt", *words])
    assert says in str(error.value) and len(str(error.value).splitlines()) <= 3 and error.value.fix
