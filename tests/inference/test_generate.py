"""Continuations are Hugging Face's, over tp too; log-probabilities are those of a teacher-forced pass."""

from __future__ import annotations

import functools
import shutil

import pytest
import tokenizers
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main as convert
from minimegatron.errors import ConfigError, DataError, NumericsError
from minimegatron.inference.engine import Engine
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from tests.inference.models import NAMES, ours, theirs, weights
from tests.inference.ranked import PROMPTS, build, continuations, different_questions, example, refusals
from tests.thorough import SLOW, mostly_thorough

SAMPLED = SamplingParams(0.8, 20, 0.95)


@functools.cache
def hugging_face(name):
    """What `generate` makes of each prompt alone; of Mamba without a cache, as its cached step limits no time step."""
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": not ours(name).config.has("mamba")}
    return [theirs(name).generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


@pytest.mark.parametrize(
    "name",
    mostly_thorough(
        NAMES,
        ["gpt2", "mistral", "gemma2", "deepseek_v3", "gpt_oss", "nemotron_h"].__contains__,
        ["gpt2", "mistral"].__contains__,
    ),
)
def test_greedy_words_are_hugging_faces(name):
    assert [c.tokens for c in generate(ours(name), PROMPTS, 12)] == hugging_face(name)


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, EP2 = {"sequence_parallel": True}, {"expert_model_parallel_size": 2}
UNEVEN = PP2 | {"num_layers_in_first_pipeline_stage": 2}  # of three layers, or of five
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
LAYOUTS = {
    2: [
        ("mistral", TP2, {}),
        ("gpt2", TP2 | SP, {}),
        ("gemma2", PP2, {}),
        ("deepseek_v3", TP2 | SP, {}),
        ("deepseek_v3", UNEVEN, {}),
        ("mixtral", TP2 | SP, {}),
        ("mixtral", EP2, ALLTOALL),
        ("olmo2", TP2, {}),
        ("nemotron_h", TP2 | SP, {}),
        ("nemotron_h", UNEVEN, {}),
        ("qwen3_next", TP2 | SP, {}),
        ("qwen3_next", PP2, {}),
        ("gpt_oss", TP2 | SP, {}),
        ("gemma3", TP2, {}),
    ],
    4: [
        ("llama3.1", {"tensor_model_parallel_size": 4}, {}),
        ("qwen3_moe", UNEVEN | EP2, {}),
        ("qwen2.5", TP2 | PP2, {}),
        ("gpt_oss", PP2 | EP2, ALLTOALL),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", mostly_thorough([2, 4], [0]))
def test_words_are_the_same_in_every_layout(ranks, world):
    cases = []
    for name, layout, fields in LAYOUTS[world]:
        config, tensors = weights(name)
        cases.append(((config.replace(**fields), tensors), layout))
    first, *others = ranks(world).run(continuations, cases, [GREEDY, SAMPLED])
    assert all(other == first for other in others), "the ranks have drawn different words"
    for (name, layout, _), (greedy, sampled) in zip(LAYOUTS[world], first, strict=True):
        alone = generate(ours(name), PROMPTS, 12, SAMPLED, seed=5)
        assert [c.tokens for c in greedy] == hugging_face(name), (name, layout)
        assert [c.tokens for c in sampled] == [c.tokens for c in alone], (name, layout)
        for made, want in zip(sampled, alone, strict=True):
            assert made.log_probs == pytest.approx(want.log_probs, abs=1e-5), (name, layout)


def test_ranks_that_were_asked_for_different_things_say_so(ranks):
    for said in ranks(2).run(different_questions, weights("mistral")):
        assert said.startswith("RankError: the ranks of tp were asked for different things")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams()], ids=str)
def test_log_probabilities_are_teacher_forced(params):
    for prompt, made in zip(PROMPTS, generate(ours("mistral"), PROMPTS, 12, params), strict=True):
        with torch.no_grad():
            logits = theirs("mistral")(torch.tensor([prompt + made.tokens])).logits[0, len(prompt) - 1 : -1]
        want = (logits / params.temperature).log_softmax(-1).gather(1, torch.tensor(made.tokens)[:, None])
        assert len(made.log_probs) == 12
        assert (torch.tensor(made.log_probs) - want[:, 0]).abs().max() <= 1e-5


def test_neighbours_change_nothing():
    engine = Engine(ours("mistral"))
    first = generate(engine, PROMPTS, 12, SAMPLED, seed=3)
    again = generate(engine, PROMPTS, 12, SAMPLED, seed=3)
    alone = generate(engine, PROMPTS[:1], 12, SAMPLED, seed=3)
    assert first == again and first[0].tokens == alone[0].tokens
    assert first != generate(engine, PROMPTS, 12, SAMPLED, seed=4)


def test_a_stop_id_ends_a_sequence_and_not_its_neighbours():
    whole = generate(ours("gpt2"), PROMPTS, 12, SAMPLED)
    stop = next(word for word in whole[0].tokens[3:] if word not in whole[1].tokens)
    made = generate(ours("gpt2"), PROMPTS, 12, SAMPLED, stop_ids=[stop, 98])
    for before, after in zip(whole, made, strict=True):
        ends = [i for i, word in enumerate(before.tokens) if word in (stop, 98)]
        kept = ends[0] + 1 if ends else 12
        assert after.tokens == before.tokens[:kept] and after.stopped == bool(ends)
        assert after.log_probs == pytest.approx(before.log_probs[:kept], abs=1e-6)
    assert made[0].stopped and len(made[0].tokens) < 12


def test_no_step_is_taken_when_all_have_stopped():
    engine = Engine(ours("gpt2"))
    first = generate(engine, PROMPTS[:1], 9)[0].tokens
    steps = engine.steps
    assert generate(engine, PROMPTS[:1], 9, stop_ids=first[:1])[0].tokens == first[:1]
    assert engine.steps == steps + 1 and generate(engine, [], 9) == []


def test_the_context_is_never_left():
    full = PROMPTS[:1] * 2
    assert len(generate(ours("gpt2"), full, 59)[0].tokens) == 59  # 5 + 59 are its 64 positions
    with pytest.raises(DataError, match="5 tokens and 60 new ones are 65, and max_model_len is 64") as error:
        generate(ours("gpt2"), full, 60)
    assert error.value.where == "prompt 0"
    with pytest.raises(ConfigError, match="max_model_len is 65, and the model has 64 learned positions"):
        generate(ours("gpt2"), full, 60, max_model_len=65)
    config, tensors = weights("llama2")
    rope = build(config.replace(max_position_embeddings=8), tensors)
    with pytest.raises(DataError) as error:
        generate(rope, full, 4)
    assert "a larger max_model_len" in error.value.fix
    longer = generate(rope, full, 9, max_model_len=14)
    assert longer == generate(ours("llama2"), full, 9), "turned positions have no end"


def test_a_step_has_more_tokens_than_there_are_learned_positions():
    model = ours("gpt2")
    many, few = (generate(model, prompts, 3) for prompts in (PROMPTS * 6, PROMPTS))  # 84 tokens, 64 positions
    assert [c.tokens for c in many] == [c.tokens for c in few] * 6
    with pytest.raises(DataError, match="a sequence of 65 tokens is longer than the 64 learned positions"):
        model.full_logits(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (([[]], 3), DataError, "without a token"),
        (([[1], [4, 99]], 3), DataError, "token id 99 is not in a vocabulary of 99"),
        (([[-1]], 3), DataError, "token id -1"),
        (([[1]], 0), ConfigError, "max_new_tokens is 0"),
        (([[1]], 3, GREEDY, [99]), ConfigError, "stop id 99"),
    ],
    ids=str,
)
def test_questions_without_an_answer(arguments, error, words):
    prompts, count, *rest = arguments
    with pytest.raises(error, match=words):
        generate(ours("llama2"), prompts, count, *rest[:1], stop_ids=rest[1] if rest[1:] else ())


class Other(CoreAttention):
    """A core that may compute something else, and does not say what it keeps."""


@pytest.mark.parametrize(
    "layout, fields, words",
    [
        ({}, {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, "scales are those of a batch"),
        ({}, {"num_experts": 4, "moe_router_topk": 2, "moe_expert_capacity_factor": 1.0}, "out of their experts"),
        ({}, {"spec": Other}, "core of a SelfAttention is a Other, which does not say what it keeps"),
        ({"training": True}, {}, "model.eval()"),
    ],
    ids=["fp8", "capacity", "core", "training"],
)
def test_models_that_cannot_generate(layout, fields, words):
    fields, core = dict(fields), fields.get("spec")
    fields.pop("spec", None)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64, "vocab_size": 64}
    config = family_config("llama", **sizes, **fields)
    spec = decoder_layer_spec(config)
    if core is not None:
        attention = spec.submodules["self_attention"]
        spec = spec.with_submodule("self_attention", ModuleSpec(attention.module, params={"core_attention": core}))
    model = build_model(config, Mesh.serial(), seed=0, spec=spec).train(layout.get("training", False))
    with pytest.raises(ConfigError) as error:
        generate(model, [[1]], 1)
    assert words in str(error.value)


def test_layouts_that_cannot_generate(ranks):
    dense = weights("llama2")[0]
    virtual = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
    cases = {
        "cp = 2": (dense, {"context_parallel_size": 2}),
        "2 virtual stages": (dense.replace(num_layers=4), virtual),
    }
    for found in ranks(2).run(refusals, list(cases.values())):
        for words, said in zip(cases, found, strict=True):
            assert said.startswith("ConfigError: generation with") and words in said


def test_what_is_no_number_is_not_a_word():
    model = build(*weights("llama2"))
    with torch.no_grad():
        model.embedding.word_embeddings.weight[7] = torch.nan
    for params in (GREEDY, SAMPLED):
        with pytest.raises(NumericsError) as error:
            generate(model, [[1, 2], [3, 7]], 3, params)
        assert error.value.where == "prompt 1, new token 0"


@SLOW
@pytest.mark.parametrize("tp", mostly_thorough([1, 2], [1]))
def test_the_command_continues_with_a_published_model(ranks, tmp_path, tp):
    """Its whole way: folder, tokenizer, this rank's part of the weights, words, text."""
    theirs("llama2").save_pretrained(tmp_path)
    words = [*map(chr, range(32, 127)), "<eos>", "<1>", "<2>", "<3>"]  # 99, as many as the model has
    ids = {word: i for i, word in enumerate(words)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "?"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    prompt = "Once upon"
    tokens = torch.tensor([[ids[character] for character in prompt]])
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 9, "do_sample": False}
    want = "".join(words[i] for i in theirs("llama2").generate(tokens, **options)[0])
    assert convert(["--load", str(tmp_path), "--save", str(tmp_path / "ours"), "--max-shard-size", "50KB"]) == 0
    shutil.copytree(tmp_path / "ours", tmp_path / "moved", ignore=shutil.ignore_patterns("huggingface"))
    asked = [str(tmp_path), str(tmp_path / "ours"), str(tmp_path / "moved")]
    lines = [[folder, prompt, "--max-new-tokens", "9"] for folder in asked]
    lines.insert(2, [*lines[2], "--tokenizer-model", str(tmp_path)])
    lines.append([*lines[0], "--temperature", "0"])
    (*made, without, refused), *others = ranks(tp).run(example, lines)
    assert made == [want.split("<eos>")[0] + "\n"] * 3
    assert without.startswith("CheckpointError: there is no tokenizer in it") and "--tokenizer-model" in without
    assert refused.startswith("ConfigError: temperature is 0.0") and all(
        other == ["", "", "", without, refused] for other in others
    )
