"""`minimegatron generate`: how words are drawn, where the text ends, and what special tokens of a prompt become."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

from minimegatron.checkpoint.companions import stop_ids
from minimegatron.commands.generate import grammar_of, parse, sampling_params
from minimegatron.commands.prompts import read_prompt
from minimegatron.commands.speculation import speculative_of
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.inference import answers
from minimegatron.inference.engine import Engine
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.sequence import Request
from minimegatron.inference.speculative import SpeculativeConfig
from minimegatron.training.arguments import parse_args
from tests.inference.models import ours, theirs
from tests.inference.ranked import asked
from tests.mock_data import small_trainer
from tests.thorough import SLOW, mostly_thorough

LETTERS = [*map(chr, range(32, 127)), "<eos>", "<1>", "<2>", "<3>"]  # 99, as many as the model has


@pytest.fixture
def llama2(tmp_path):
    """A published folder whose tokenizer has a word a character, and three tokens for conversations."""
    return published("llama2", tmp_path)


def published(name, tmp_path):
    """A folder with a model and that tokenizer."""
    theirs(name).save_pretrained(tmp_path)
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


@pytest.mark.slow
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
        tokenizer = HuggingFaceTokenizer(llama2, split_special_tokens=args.split_special_tokens)
        return read_prompt(args.prompt, tokenizer, add_special_tokens=args.add_special_tokens)

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
    tokenizer = HuggingFaceTokenizer(llama2, split_special_tokens=False)
    assert read_prompt("Who?", tokenizer, chat=True) == (want, [])
    notes = read_prompt("<2>", tokenizer, chat=True)[1]
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
        (["--prompts-file", "f"], "a prompt or --prompts-file FILE, one of the two"),
        (["--stop", ""], "would end every answer before it begins"),
    ],
    ids=str,
)
def test_a_wrong_line_is_answered_in_three(words, says):
    with pytest.raises(ConfigError) as error:
        parse(["folder", "prompt", *words])
    assert says in str(error.value) and len(str(error.value).splitlines()) <= 3 and error.value.fix


PROMPTS = ["Once", "Who are you?", "a"]
FILE = ["--max-new-tokens", "8", "--stop-token-ids"]


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def of_file(folder, *more):
    """A line that asks for answers to all prompts."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return [str(folder), "--prompts-file", str(folder / "prompts.txt"), *FILE, *more]


def test_many_prompts_are_lines_of_json(ranks, llama2):
    """In the order of the file, whatever runs at once; one prompt alone has the same answer."""
    (llama2 / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "id": 3}) + "\n" for p in PROMPTS))
    drawn = ["--temperature", "1", "--seed", "3"]
    lines = [
        of_file(llama2),
        of_file(llama2, *drawn, "--n", "3"),
        of_file(llama2, *drawn, "--n", "3", "--max-num-seqs", "1"),
        [str(llama2), "--prompts-file", str(llama2 / "prompts.jsonl"), *FILE, *drawn],
        [str(llama2), PROMPTS[0], *FILE, *drawn],
        of_file(llama2, "--n", "2"),
    ]
    (plain, said), (several, _), (fewer, _), (one, _), (text, _), (_, equal) = ranks(1).run(asked, lines)[0]
    assert "(3 answers to 3 prompts, 24 tokens in " in said and "--n 2 gives equal answers" in equal
    found = lines_of(plain)
    for prompt, line in zip(PROMPTS, found, strict=True):
        ids = [96, *map(LETTERS.index, prompt)]
        assert line["tokens"] == generate(ours("llama2"), [ids], 8)[0].tokens and line["prompt"] == prompt
        assert line["finish_reason"] == "length" and line["stop_reason"] is None and line["index"] == 0
    assert several == fewer and len({line["text"] for line in lines_of(several)}) == 9
    assert [(line["prompt"], line["index"]) for line in lines_of(several)] == [
        (p, i) for p in PROMPTS for i in range(3)
    ]
    first = [line for line in lines_of(several) if line["index"] == 0]
    assert lines_of(one) == first and text == "Once" + first[0]["text"] + "\n"


def test_a_stop_string_ends_an_answer_before_it(ranks, llama2):
    whole = lines_of(ranks(1).run(asked, [of_file(llama2)])[0][0][0])
    stop = whole[1]["text"][2:4]
    lines = [of_file(llama2, "--stop", stop, "--stop", "never"), [str(llama2), PROMPTS[1], *FILE, "--stop", stop]]
    (text, _), (alone, said) = ranks(1).run(asked, lines)[0]
    for before, after in zip(whole, lines_of(text), strict=True):
        place = before["text"].find(stop)
        assert after["text"] == (before["text"] if place < 0 else before["text"][:place])
        assert after["finish_reason"] == ("length" if place < 0 else "stop")
        if place >= 0:
            assert after["stop_reason"] == stop and len(after["tokens"]) == place + len(stop) < 8, "it went on"
    assert alone == PROMPTS[1] + whole[1]["text"][: whole[1]["text"].find(stop)] + "\n"
    assert f"ended before {stop!r} (--stop)" in said


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_answers_are_json_of_a_schema(ranks, llama2, monkeypatch):
    pytest.importorskip("llguidance")
    (llama2 / "schema.json").write_text(json.dumps(SCHEMA))
    (llama2 / "list.json").write_text("[1]")
    long, drawn = ["--max-new-tokens", "60", "--stop-token-ids"], ["--temperature", "1", "--n", "4"]
    lines = [
        of_file(llama2, *long, *drawn, "--json-schema", str(llama2 / "schema.json")),
        [str(llama2), "Once", *long, "--json-schema", json.dumps(SCHEMA)],
        [str(llama2), "Once", "--max-new-tokens", "3", "--stop-token-ids", "--json-schema", json.dumps(SCHEMA)],
        [str(llama2), "Once", "--json-schema", str(llama2 / "none.json")],
        [str(llama2), "Once", "--json-schema", str(llama2 / "list.json")],
        [str(llama2), "Once", "--json-schema", "{"],
        [str(llama2), "Once", "--json-schema", '{"type": "object", "minProperties": -1}'],
    ]
    (many, _), (one, said), (cut, shorter), *refused = ranks(1).run(asked, lines)[0]
    found = [(json.loads(line["text"]), line["finish_reason"], line["stop_reason"]) for line in lines_of(many)]
    assert len(found) == 12 and len({answer["kind"] for answer, *_ in found}) == 2, "both were drawn"
    for answer, reason, stop in found:
        assert list(answer) == ["kind", "old"] and isinstance(answer["old"], bool)
        assert (reason, stop) == ("stop", None)
    assert json.loads(one.removeprefix("Once"))["kind"] in ("cat", "dog") and "the schema allows no more" in said
    assert len(cut) == len("Once") + 4 and "no stop token among them" in shorter
    says = ["no schema can be read", "a JSON list", "is no JSON", "the grammar cannot be read"]
    for words, (_, said) in zip(says, refused, strict=True):
        assert words in said and "fix:" in said
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'minimegatron\[structured\]'"):
        grammar_of(json.dumps(SCHEMA))


def test_penalties_and_log_probabilities(ranks, llama2):
    """Greedy with a penalty is transformers'; log-probabilities are the model's own, with the most likely tokens."""
    lines = [
        of_file(llama2, "--repetition-penalty", "1.7", "--log-probs", "2"),
        [str(llama2), PROMPTS[0], *FILE, "--min-p", "1.0"],
        [str(llama2), PROMPTS[0], *FILE],
        [str(llama2), PROMPTS[0], *FILE, "--frequency-penalty", "5", "--presence-penalty", "3"],
    ]
    (text, _), (first, _), (greedy, _), (penalised, _) = ranks(1).run(asked, lines)[0]
    for prompt, line in zip(PROMPTS, lines_of(text), strict=True):
        ids = torch.tensor([[96, *map(LETTERS.index, prompt)]])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
        want = theirs("llama2").generate(ids, repetition_penalty=1.7, **options)
        assert line["tokens"] == want[0, ids.shape[1] :].tolist()
        with torch.no_grad():
            logits = theirs("llama2")(want).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        chosen = logits.gather(1, want[0, ids.shape[1] :, None])[:, 0].tolist()
        assert line["log_probs"] == pytest.approx(chosen, abs=1e-5)
        best = logits.topk(2)
        assert [[token for token, _ in each] for each in line["top_log_probs"]] == best.indices.tolist()
        assert [value for each in line["top_log_probs"] for _, value in each] == pytest.approx(
            best.values.flatten().tolist(), abs=1e-5
        )
    assert first == greedy != penalised
    assert len({*penalised.removeprefix(PROMPTS[0])}) == 9, "a letter came twice"  # 8 and the end of the line


SPECULATE = "--speculative-config"


def test_who_proposes_changes_no_answer(ranks, llama2):
    """n-grams also where tokens are drawn; the model itself as the draft model is always right."""
    ngram = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}'
    draft, drawn = json.dumps({"model": str(llama2)}), ["--temperature", "0.9", "--n", "2"]
    lines = [of_file(llama2), of_file(llama2, SPECULATE, ngram), of_file(llama2, SPECULATE, draft)]
    lines += [of_file(llama2, *drawn), of_file(llama2, *drawn, SPECULATE, ngram)]
    lines += [of_file(llama2, SPECULATE, '{"method": "mtp"}')]
    plain, looked_up, drafted, sampled, both, (_, refused) = ranks(1).run(asked, lines)[0]
    assert lines_of(plain[0]) == lines_of(looked_up[0]) == lines_of(drafted[0])
    assert lines_of(sampled[0]) == lines_of(both[0])
    accepted, proposed = re.search(r"(\d+) of (\d+) proposed tokens were accepted", drafted[1]).groups()
    assert accepted == proposed != "0" and "accepted" not in plain[1]
    assert "num_speculative_tokens is 1, and the model has 0 depths" in refused


RUN = (
    "--mock-data --seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 99 --lr 3e-3 "
    "--train-iters 2 --micro-batch-size 2 --global-batch-size 4 --mtp-num-layers 2 --save-interval 2 --save"
)


@SLOW
def test_depths_that_a_run_has_trained_propose(ranks, llama2, tmp_path):
    run = tmp_path / "run"
    small_trainer(parse_args([*RUN.split(), str(run)]), quiet=True).train()
    line = [str(run), "abc", "--tokenizer-model", str(llama2), "--max-new-tokens", "12", "--stop-token-ids"]
    (plain, _), (text, said) = ranks(1).run(asked, [line, [*line, SPECULATE, '{"method": "mtp"}']])[0]
    assert text == plain != "" and re.search(r"\d+ of [1-9]\d* proposed tokens were accepted", said)


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "is no JSON"),
        ("[]", "fix: an object"),
        ('{"methode": "ngram"}', "did you mean `method`"),
        ('{"num_speculative_tokens": "3"}', "num_speculative_tokens of --speculative-config is '3'"),
        ('{"num_speculative_tokens": true}', "is True"),
        ('{"method": "eagle"}', "speculative method 'eagle'"),
        ('{"method": "draft_model"}', "belong together"),
        ('{"method": "mtp", "model": "a"}', "belong together"),
    ],
)
def test_proposers_that_are_none(text, says):
    with pytest.raises(ConfigError) as error:
        speculative_of(text, ours("llama2").config)
    assert says in str(error.value) and "fix:" in str(error.value)


def test_proposers_by_their_names():
    model = ours("llama2").config.replace(mtp_num_layers=2)
    assert speculative_of(None, model) == (None, None)
    assert speculative_of('{"model": "a"}', model) == (SpeculativeConfig("draft_model"), Path("a"))
    assert speculative_of('{"method": "mtp"}', model) == (SpeculativeConfig("mtp", 2), None)
    text = '{"num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 3}'
    assert speculative_of(text, model) == (SpeculativeConfig("ngram", 5, 3, 3), None)


def test_long_work_says_how_far_it_is(llama2, monkeypatch, capsys):
    monkeypatch.setattr(answers, "EVERY", 0.0)
    tokenizer, prompts = HuggingFaceTokenizer(llama2), [Request((5, 9, 3), 2), Request((1, 2), 4, n=2)]
    assert len(answers.compute(Engine(ours("llama2")), prompts, tokenizer, [])) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("0 of 3 answers, 3 tokens, ") and lines[-1].startswith("3 of 3 answers, 10 tokens, ")
    scored = Request((5, 9, 3), 0, prompt_log_probs=1)  # nothing is drawn, and no answer is called right
    answers.compute(Engine(ours("llama2")), [scored], tokenizer, [])
    assert capsys.readouterr().err.splitlines()[-1] == "1 of 1 answers are scored"


@SLOW
@pytest.mark.parametrize("world", mostly_thorough([2, 4], [0]))
def test_the_answers_are_the_same_in_every_layout(ranks, tmp_path, world):
    """Replicas share the prompts out: three over two of them, and over four."""
    tp, pp, ep = (f"--{what}-model-parallel-size" for what in ("tensor", "pipeline", "expert"))
    layouts = {
        2: [[], [pp, "2"], [ep, "2"], [tp, "1"]],
        4: [[ep, "2"], [pp, "2", ep, "2"], [tp, "2"], [tp, "1"]],
    }[world]
    line = of_file(published("mixtral", tmp_path), "--n", "2", "--temperature", "0.9", "--seed", "4")
    want = lines_of(ranks(1).run(asked, [line])[0][0][0])
    assert len({each["text"] for each in want}) == 6
    refused = [[pp, "3"], [tp, "1", ep, "3"]]
    first, *others = ranks(world).run(asked, [[*line, *layout] for layout in layouts + refused])
    for layout, (text, said) in zip(layouts, first, strict=False):
        assert text and lines_of(text) == want, (layout, said)
    assert all(said.startswith("ConfigError") for _, said in first[len(layouts) :])
    assert all(answer == ("", "") for other in others for answer in other[: len(layouts)])


def test_files_and_models_that_cannot_be_continued(ranks, llama2):
    (llama2 / "empty.txt").write_text("")
    (llama2 / "gap.txt").write_text("a\n\nb\n")
    (llama2 / "other.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    cases = {
        "none.txt": "no prompts can be read",
        "empty.txt": "no prompt in it",
        "gap.txt": "gap.txt, line 2",
        "other.jsonl": "other.jsonl, line 2",
    }
    lines = [[str(llama2), "--prompts-file", str(llama2 / name)] for name in cases]
    answers = ranks(1).run(asked, [*lines, [str(llama2), "a", "--cuda-graph"]])[0]
    for words, (_, said) in zip([*cases.values(), "a CUDA graph on a cpu"], answers, strict=True):
        assert said.startswith(("DataError", "ConfigError")) and words in said and "fix:" in said
