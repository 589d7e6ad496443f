"""Adapters that requests choose: each answer is that of a model with this adapter alone, merged by PEFT."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.cli import main
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.inference.adapters import load_adapters, memory
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.loading import load
from minimegatron.inference.sampling import SamplingParams
from minimegatron.inference.sequence import Request
from minimegatron.inference.speculative import SpeculativeConfig
from minimegatron.layers.lora import packed_of
from tests.inference.ranked import PROMPTS, adapted_answers, run
from tests.inference.test_quantize import FLAGS, quantise
from tests.models.test_huggingface import hf_model
from tests.recorder import OnACpu
from tests.thorough import mostly_slow

NAME = "qwen2.5-tied-mqa"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OTHER = {"all": (3, 5, ALL), "some": (5, 4, ["q_proj", "v_proj", "down_proj"]), "attention": (2, 8, ALL[:4])}
SIZES = EngineConfig(48, page_size=4, max_num_seqs=5, max_num_batched_tokens=7)  # prompts in chunks


class Made(NamedTuple):
    """Folders: the base, and for each adapter PEFT's folder, and the model with it merged. And what PEFT answers."""

    base: Any
    adapters: dict[str, Any]
    merged: dict[str, Any]
    told: dict[str, list[list[int]]]


def make(folder, name, given):
    import peft  # 660 modules, which other files of a run do without

    base = hf_model(name)
    base.save_pretrained(str(folder / "base"))
    merged, told = {"": folder / "base"}, {}
    for k, (key, (rank, alpha, modules)) in enumerate(given.items()):
        torch.manual_seed(k)
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
        model = peft.get_peft_model(hf_model(name), config)
        for which, param in model.named_parameters():
            if "lora_" in which:
                param.data.normal_(0, 0.25)
        model.save_pretrained(str(folder / key))
        model.merge_and_unload().save_pretrained(str(folder / f"{key}-merged"))
        merged[key] = folder / f"{key}-merged"
    several = peft.PeftModel.from_pretrained(hf_model(name), str(folder / next(iter(given))), next(iter(given)))
    for key in given:
        several.load_adapter(str(folder / key), key)
        several.set_adapter(key)
        several.generation_config.eos_token_id = several.generation_config.pad_token_id = None
        told[key] = [
            several.eval()
            .generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
            .tolist()
            for prompt in PROMPTS
        ]
    return Made(folder / "base", {key: folder / key for key in given}, merged, told)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("adapters"), NAME, OTHER)


def requests(names, **options):
    """Every prompt with every adapter and without, greedy, and one that is drawn; neighbours have different ones."""
    greedy = {"log_probs": 0, **options}
    found = {
        f"{i} {name}": Request(tuple(prompt), 8, adapter=name, **greedy)
        for i, prompt in enumerate(PROMPTS)
        for name in ("", *names)
    }
    drawn = {
        f"drawn {name}": Request((5, 9, 3), 8, SamplingParams(0.9), seed=3, adapter=name, **greedy) for name in names
    }
    return found | drawn


def plain(answers):
    return {name: (sequence.answer, sequence.log_probs) for name, (sequence,) in answers.items()}


@functools.cache
def alone(folder):
    return load(open_model(folder), Mesh.serial(), "fp32")


def wanted(made, asked):
    """What models with one adapter merged answer to these requests."""
    found = {}
    for key, folder in made.merged.items():
        mine = {name: each for name, each in asked.items() if each.adapter == key}
        engine = Engine(alone(folder), SIZES)
        bare = {
            name: Request(each.prompt, 8, each.sampling, seed=each.seed, log_probs=0) for name, each in mine.items()
        }
        found |= plain(run(engine, bare))
    return found


def assert_same(found, want):
    assert found.keys() == want.keys()
    for name, (tokens, log_probs) in want.items():
        assert found[name][0] == tokens, name
        assert max(abs(a - b) for a, b in zip(found[name][1], log_probs, strict=True)) < 1e-5, name


def served(made, config=SIZES, folder=None, **options):
    opened = open_model(folder or made.base)
    model = load(opened, Mesh.serial(), "fp32")
    return Engine(model, config, adapters=load_adapters(model, opened, made.adapters), **options)


def test_a_batch_mixes_adapters_and_each_answer_is_that_of_its_own_merged(made):
    """Beside models merged by PEFT, and PEFT's own words for `set_adapter`."""
    asked = requests(OTHER)
    engine = served(made)
    found = plain(run(engine, asked))
    assert_same(found, wanted(made, asked))
    for name in OTHER:
        assert [found[f"{i} {name}"][0] for i in range(len(PROMPTS))] == made.told[name]
    assert len({tuple(found[f"2 {name}"][0]) for name in ("", *OTHER)}) == 4, "the adapters matter"
    assert "3 of rank 5 or less beside 8 layers" in memory(engine.model, engine.adapters)


@pytest.mark.parametrize(
    "layout",
    mostly_slow([{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}], [0]),
    ids=["tp2", "pp2"],
)
def test_ranks_answer_as_one(ranks, made, layout):
    asked = requests(OTHER)
    found, _ = ranks(2).run(adapted_answers, made.base, made.adapters, layout, SIZES, asked)
    assert_same(found, wanted(made, asked))


def test_adapters_of_attention_beside_experts_over_tp_with_sequence_parallelism(ranks, tmp_path):
    few = {"one": (2, 4, ["q_proj", "o_proj"]), "two": (3, 5, ["v_proj", "o_proj"])}
    made = make(tmp_path, "qwen3_moe", few)
    asked = requests(few)
    layout = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
    layout["expert_model_parallel_size"] = 2
    found, _ = ranks(2).run(adapted_answers, made.base, made.adapters, layout, SIZES, asked)
    assert_same(found, wanted(made, asked))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_changes_no_answer(made, method):
    """The draft model is the base: it knows no adapter."""
    asked = {name: each for name, each in requests(OTHER).items() if "drawn" not in name}
    config = EngineConfig(
        48, page_size=4, max_num_seqs=4, max_num_batched_tokens=16, speculative=SpeculativeConfig(method, 3)
    )
    engine = served(made, config, draft=alone(made.base) if method == "draft_model" else None)
    assert_same(plain(run(engine, asked)), wanted(made, asked))
    assert method == "ngram" or engine.proposed_tokens


def test_pages_belong_to_an_adapter(made):
    """The same prompt is found again under its own adapter, and under no other."""
    engine, prompt = served(made), tuple(range(1, 18))
    asked = {name: Request(prompt, 8, log_probs=0, adapter=name) for name in ("", *OTHER)}
    first = plain(run(engine, asked, every=30))
    assert engine.scheduler.blocks.hits == 0
    again = plain(run(engine, asked))
    assert engine.scheduler.blocks.hits == 16 * len(asked)
    for found in (first, again):
        assert_same(found, wanted(made, asked))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_adapters_beside_packed_weights_are_those_beside_dequantised_ones(made, tmp_path, scheme):
    quantise(made.base, "--save", tmp_path / "small", "--scheme", scheme, *FLAGS[scheme])
    opened, asked = open_model(tmp_path / "small"), requests(OTHER)
    answers = []
    for packed in (True, False):
        model = load(opened, Mesh.serial(), "fp32", packed)
        assert bool(packed_of(model)) == packed
        adapters = load_adapters(model, opened, made.adapters)
        answers.append(plain(run(Engine(model, SIZES, adapters=adapters), asked)))
    assert_same(*answers)


def test_what_is_no_adapter_of_the_model_is_refused(made, tmp_path):
    opened = open_model(made.base)
    model = load(opened, Mesh.serial(), "fp32")
    with pytest.raises(CheckpointError, match="adapter x has no adapter_config.json") as caught:
        load_adapters(model, opened, {"x": tmp_path})
    assert "lora export" in caught.value.fix
    with pytest.raises(ConfigError, match="the adapter 'al', and the engine has all, some, attention") as caught:
        served(made).add_request(Request((1, 2), 1, adapter="al"), "a")
    assert "all" in caught.value.fix
    with pytest.raises(ConfigError, match="and the engine has none"):
        Engine(model, SIZES).add_request(Request((1, 2), 1, adapter="all"), "a")
    with pytest.raises(ConfigError, match="which rows have which adapter is another in every step"):
        served(made, recorder=OnACpu())
    words = ["--load", str(made.base), "--adapter", str(made.adapters["all"]), "--save", str(tmp_path / "run")]
    assert main(["lora", "import", *words]) == 0
    own = open_model(tmp_path / "run")
    with pytest.raises(ConfigError, match="a model that has one of its own") as caught:
        load_adapters(load(own, Mesh.serial(), "fp32"), own, made.adapters)
    assert "lora merge" in caught.value.fix
