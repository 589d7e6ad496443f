"""Lab 08's checks: what the judge takes for right, beside the package and Hugging Face; saves that only seem safe."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from course.lab08.small_run import Run

from labkit.exercises import Draw
from labkit.hbm import Memory
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.checkpoint.regions import regions
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import ParamLayout
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from tests.course.marked import LABS

MARKED = LABS["08_checkpoints"]
LAB = MARKED.lab
PUBLISHED = import_module("course.08_checkpoints.checks.published")


def drawn(exercise, seed):
    """The inputs of the first hidden case."""
    return next(case.inputs(Draw(seed)) for case in LAB[exercise].cases if case.hidden)


@pytest.mark.parametrize("seed", range(5))
def test_the_boxes_are_those_of_the_package(seed):
    inputs = drawn("boxes_of", seed)
    shape, dim = (inputs["rows"], inputs["columns"]), inputs["dim"]
    share, parts = shape[dim] // inputs["parts"], inputs["parts"]
    layout = ParamLayout(shape, dim, tuple(((i * share, (i + 1) * share),) for i in range(parts)), inputs["part"])
    piece = slice(inputs["start"], inputs["stop"])
    found = regions(layout, torch.zeros(inputs["stop"] - inputs["start"]), piece)
    assert LAB["boxes_of"].reference(**inputs) == [[list(range_) for range_ in one.box] for one in found]


@pytest.mark.parametrize("seed", range(3))
def test_a_published_model_becomes_what_the_package_makes_of_it(seed):
    inputs = drawn("from_hf", seed)
    theirs, heads, groups = inputs["theirs"], inputs["heads"], inputs["groups"]
    rows = theirs["model.layers.0.self_attn.q_proj.weight"].shape[0]
    config = family_config(
        "qwen2", num_layers=2, hidden_size=theirs["model.norm.weight"].numel(), num_attention_heads=heads,
        num_query_groups=groups, kv_channels=rows // heads, vocab_size=5,
        ffn_hidden_size=theirs["model.layers.0.mlp.up_proj.weight"].shape[0], untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    want = state_from_huggingface(theirs, config, "qwen2")
    mine = LAB["from_hf"].reference(**inputs)
    assert mine.keys() == want.keys() and all(torch.equal(mine[name], want[name]) for name in want)


def test_a_model_of_transformers_says_the_same_through_the_judges_conversion():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False}  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
    config = family_config(
        "qwen2", num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
        vocab_size=128, rotary_base=theirs.config.rope_parameters["rope_theta"],
        layernorm_epsilon=theirs.config.rms_norm_eps,
    )  # fmt: skip
    ours = build_model(config, Mesh.serial(), 1)
    load_logical(ours, PUBLISHED.converted({n: t.detach() for n, t in theirs.state_dict().items()}, 4, 2))
    ids = torch.arange(20).view(1, 20) * 7 % 128
    torch.testing.assert_close(ours(ids).transpose(0, 1), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_read_that_cannot_be_is_told_in_numbers() -> None:
    memory = Memory(shard_0=torch.arange(11.0), table=torch.zeros(3, 2))
    for (name, first, last), words in {
        ("shard_0", 9, 12): "shard_0 has 11 numbers; asked for are 9 to 12, the last not included",
        ("shard_0", 6, 6): "an empty read of shard_0: 6 to 6",
        ("table", 2, 4): "table has 3 rows; asked for are 2 to 4, the last not included",
    }.items():
        with pytest.raises(ConfigError, match=words):
            memory.load(name, first, last)


def test_the_small_run_is_the_same_with_the_same_seed():
    """A check of "bit for bit" needs it; `answers/resume.py` forgets each of its parts."""
    assert Run(1).train(5) == Run(1).train(5) != Run(2).train(5)
