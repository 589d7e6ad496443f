"""An engine with packed weights gives the words of one with dequantised weights, which it never has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.inference.loading import load
from minimegatron.inference.refit import Refit, weights_of
from minimegatron.layers.lora import packed_of
from tests.inference.ranked import PROMPTS, asked, packed_words
from tests.inference.test_quantize import FLAGS, publish, quantise
from tests.thorough import mostly_thorough


def small(name: str, scheme: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A quantised folder of a tiny model."""
    publish(name, folder / "whole", dtype)
    size = {"qwen2_moe": 8, "qwen3_moe": 16}.get(name, 32)  # rows of 56 and of 48 elements
    flags = [size if flag == 32 else flag for flag in FLAGS[scheme]]
    quantise(folder / "whole", "--save", folder / "small", "--scheme", scheme, *flags)
    return folder / "small"


def answers(model: Any) -> list[Any]:
    config = EngineConfig(64, max_num_seqs=2, max_num_batched_tokens=8)
    return generate(Engine(model, config), PROMPTS, 12)


def close(found: list[Any], wanted: list[Any]) -> bool:
    """The same words, whose log-probabilities differ by rounding."""
    return all(
        a.tokens == b.tokens and max(abs(x - y) for x, y in zip(a.log_probs, b.log_probs, strict=True)) < 1e-5
        for a, b in zip(found, wanted, strict=True)
    )


CASES = [
    (n, s) for n in ("llama2", "qwen3", "gemma2", "qwen2_moe", "qwen3_moe", "deepseek_v3") for s in ("int8", "int4")
]
CASES.remove(("deepseek_v3", "int4"))  # rows of 20 elements
FEW = [("llama2", "int4"), ("qwen2_moe", "int8")]


@pytest.mark.parametrize(("name", "scheme"), mostly_thorough(CASES, FEW.__contains__, FEW[:1].__contains__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_words_are_those_of_the_numbers(name, scheme, dtype, tmp_path):
    folder = open_model(small(name, scheme, tmp_path, dtype))
    mine, plain = load(folder, Mesh.serial(), "fp32"), load(folder, Mesh.serial(), "fp32", packed=False)
    packed = packed_of(mine)
    assert len(packed) >= 2 * mine.config.num_layers and not packed_of(plain)
    numbers = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in mine.parameters())
    assert numbers == sum(p.shape[0] * p.shape[1] for p in packed), "no matrix is there twice"
    assert close(answers(mine), answers(plain))


@pytest.mark.parametrize("scheme", mostly_thorough(["int8", "int4"], [1]))
def test_a_cut_over_tp_goes_through_words_and_groups(scheme, tmp_path, ranks):
    """Groups of 32 in rows of 96, over two ranks."""
    folder = small("llama2", scheme, tmp_path)
    wanted = answers(load(open_model(folder), Mesh.serial(), "fp32", packed=False))
    for found, packed in ranks(2).run(packed_words, folder):
        assert packed and close(found, wanted)


def test_the_command_says_how_much_memory_they_take(tmp_path, ranks):
    folder = small("llama2", "int4", tmp_path)
    ((_, said),) = ranks(1).run(asked, [[str(folder), "w5 w6", "--max-new-tokens", "1"]])[0]
    assert "in int4, groups of 32, which would be" in said and "dequantised" in said


def test_packed_weights_are_given_no_others(tmp_path):
    folder = open_model(small("llama2", "int8", tmp_path))
    mine, plain = load(folder, Mesh.serial(), "fp32"), load(folder, Mesh.serial(), "fp32", packed=False)
    with pytest.raises(ConfigError, match="linear_qkv"):
        Refit(weights_of(plain), Engine(mine, EngineConfig(64)))
