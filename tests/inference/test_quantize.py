"""Quantised weights: the package `compressed-tensors` makes the same bits of them, and transformers the same logits."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimegatron.checkpoint.compressed_tensors import Dequantised, Quantised, linear_weights, quantization_config
from minimegatron.checkpoint.conversion import open_model
from minimegatron.checkpoint.sources import InMemory
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main as convert
from minimegatron.commands.quantize import main, perplexity, pieces
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import CheckpointError, ConfigError, DataError
from minimegatron.inference.awq import folds_of, scale_by_activations
from minimegatron.inference.loading import load
from minimegatron.kernels.quantized import FP8, SCHEMES, Scheme, dequantize, pack, quantize, rounded, unpack
from tests.checkpoint.test_export import write_tokenizer
from tests.inference.models import theirs, weights
from tests.inference.ranked import build, ids, logits_of_folder
from tests.thorough import mostly_thorough

INT4 = Scheme("int", 4, 32)  # groups that divide the tiny models' rows
FLAGS: dict[str, list[Any]] = {"int8": [], "int4": ["--group-size", 32], "fp8": []}


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random weights, a row of zeros and a large one among them."""
    found = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    found[0], found[1] = 0.0, 40 * found[1]
    return found.to(dtype)


# ------------------------------------------------------------------------------------------------- arithmetic


def their_args(scheme: Scheme) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    keys = quantization_config(scheme, [])["config_groups"]["group_0"]["weights"]
    return quantization.QuantizationArgs(**keys)


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), INT4, Scheme("int", 8, 64)])
def test_scales_and_elements_are_the_packages(scheme):
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args, weight = their_args(scheme), matrix(24, 256)
    grouped = weight.unflatten(1, (-1, scheme.group_size or 256))
    their_scale, _ = helpers.calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    wanted = lifecycle.quantize(weight, their_scale, None, args, dtype=FP8 if scheme.type == "float" else torch.int8)
    q, scale = quantize(weight, scheme, torch.float32)
    assert torch.equal(scale, their_scale)
    assert torch.equal(q.view(torch.int8), wanted.view(torch.int8))
    back = lifecycle.dequantize(wanted, their_scale, None, args)
    assert torch.equal(dequantize(q, scale, scheme), back)
    assert (back - weight).abs().max() > 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 33, 128, 200])
def test_packed_words_are_the_packages(bits, columns):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    most = 2 ** (bits - 1)
    q = torch.randint(-most, most, (5, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(columns))
    q[0], q[1] = -most, most - 1
    words = pack(q, bits)
    assert torch.equal(words, helpers.pack_to_int32(q, bits))
    assert torch.equal(unpack(words, bits, columns), q)
    assert torch.equal(helpers.unpack_from_int32(words, bits, q.shape), q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shorter_last_group_is_a_group(dtype):
    weight = matrix(6, 200, dtype)
    q, scale = quantize(weight, SCHEMES["int4"], dtype)
    assert scale.shape == (6, 2) and scale.dtype == dtype
    for i, part in enumerate((weight[:, :128], weight[:, 128:])):
        whole = Scheme("int", 4)
        q_of_part, scale_of_part = quantize(part, whole, dtype)
        assert torch.equal(q[:, 128 * i : 128 * i + part.shape[1]], q_of_part)
        assert torch.equal(scale[:, i : i + 1], scale_of_part)
    step = scale.repeat_interleave(128, 1)[:, :200].float()
    error = (dequantize(q, scale, SCHEMES["int4"]).float() - weight.float()).abs()
    assert (error <= 0.52 * step + 0.01 * weight.float().abs()).all()  # half a step, and the rounding of scales


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Scheme("int", 4, 24)])
def test_a_part_of_a_matrix_is_read_without_the_rest(scheme):
    """Cuts through words and through groups, the last of which is shorter: what each tp rank reads is its part."""
    weight = matrix(12, 200)
    dtypes = {"a.weight": torch.float32}
    stored = Quantised(InMemory({"a.weight": weight}), dtypes, ["a.weight"], scheme)
    files = InMemory({name: stored.read(name) for name in stored.tensors})
    assert all(files.tensors[name] == described for name, described in stored.tensors.items())
    source = Dequantised(files, scheme)
    wanted = rounded(weight, scheme)
    assert torch.equal(source.read("a.weight"), wanted)
    for rows in ((0, 12), (3, 7)):
        for columns in ((0, 100), (100, 200), (50, 100), (67, 134), (13, 14), (192, 200)):
            part = source.read("a.weight", (rows, columns))
            assert torch.equal(part, wanted[slice(*rows), slice(*columns)]), (rows, columns)


# ----------------------------------------------------------------------------------------------------- folders


def publish(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a tiny model, with a tokenizer of 60 words."""
    copy.deepcopy(theirs(name)).to(dtype).save_pretrained(folder)
    return write_tokenizer(folder)


def quantise(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


def a_text(file: Path, seed: int = 0) -> Path:
    words = torch.randint(4, 60, (300,), generator=torch.Generator().manual_seed(seed))
    file.write_text(" ".join(f"w{i}" for i in words.tolist()))
    return file


@torch.no_grad()
def logits_in_transformers(folder: Path, **options: Any) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
    return model(ids(2, 12)).logits


CASES = [(n, s) for n in ("llama2", "qwen3", "gemma2", "olmo2", "qwen3_moe", "mixtral", "deepseek_v3") for s in FLAGS]
CASES.remove(("deepseek_v3", "int4"))  # rows of 20 elements
CASES.append(("qwen3_next", "int8"))
FEW = [("qwen3", "int8"), ("llama2", "int4"), ("qwen3_moe", "fp8")]


@pytest.mark.parametrize(("name", "scheme"), mostly_thorough(CASES, lambda case: case in FEW))
def test_transformers_computes_the_same_of_a_quantised_folder(name, scheme, tmp_path):
    pytest.importorskip("compressed_tensors")
    publish(name, tmp_path / "whole")
    flags = [16 if flag == 32 and name == "qwen3_moe" else flag for flag in FLAGS[scheme]]  # its experts have 48 rows
    quantise(tmp_path / "whole", "--save", tmp_path / "small", "--scheme", scheme, *flags)
    found, plain = logits_of_folder(0, 1, tmp_path / "small"), logits_of_folder(0, 1, tmp_path / "whole")
    wanted = logits_in_transformers(tmp_path / "small")
    assert (found - wanted).abs().max() < 1e-5
    assert 1e-4 < (found - plain).abs().max() < 0.6 * plain.abs().max(), "it is quantised, and the same model"
    assert (tmp_path / "small" / "tokenizer.json").is_file()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("scheme", FLAGS)
def test_in_bfloat16_every_weight_is_the_packages(scheme, tmp_path):
    import transformers

    pytest.importorskip("compressed_tensors")
    publish("llama2", tmp_path / "whole", torch.bfloat16)
    quantise(tmp_path / "whole", "--save", tmp_path / "small", "--scheme", scheme, *FLAGS[scheme])
    unpacked = transformers.CompressedTensorsConfig(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", quantization_config=unpacked)
    mine = open_model(tmp_path / "small")
    assert mine.config.params_dtype == "bf16" and read.dtype == torch.bfloat16
    fc2 = read.model.layers[1].mlp.down_proj.weight
    assert torch.equal(mine.weights.read("decoder.layers.1.mlp.linear_fc2.weight"), fc2)


def test_a_quantised_folder_is_one_over_tp_and_becomes_a_plain_one(tmp_path, ranks, capsys):
    """Groups of 32 in rows of 96, over two ranks: the cut goes through a group."""
    publish("llama2", tmp_path / "whole")
    quantise(tmp_path / "whole", "--save", tmp_path / "small", "--scheme", "int4", "--group-size", 32)
    assert "rounded as it is" in capsys.readouterr().out
    wanted = logits_of_folder(0, 1, tmp_path / "small")
    for logits in ranks(2).run(logits_of_folder, tmp_path / "small"):
        assert (logits - wanted).abs().max() < 1e-5
    convert(["--load", str(tmp_path / "small"), "--save", str(tmp_path / "ours")])
    convert(["--load", str(tmp_path / "ours"), "--save", str(tmp_path / "plain")])
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (logits_in_transformers(tmp_path / "plain") - wanted).abs().max() < 1e-5


# --------------------------------------------------------------------------------------------- activation-aware

FAMILIES = [
    "llama2",
    "llama2-mha-bias",
    "qwen2.5-tied-mqa",
    "gemma2",
    "olmo2",
    "qwen2_moe",
    "deepseek_v3",
    "qwen3_next",
]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_scales_leave_the_model_as_it_is(name):
    """Every place, with scales of its own and far from 1: the logits stay, and the products are what is scaled."""
    config, tensors = weights(name)
    model, tokens = build(config, tensors), ids(2, 12)
    wanted = model.full_logits(tokens)
    folds = folds_of(model)
    for i, fold in enumerate(folds):
        size = fold.weights[0].shape[-1]
        draw = torch.Generator().manual_seed(i)
        if fold.heads is None:
            s = 0.25 + 4 * torch.rand(size, generator=draw)
        else:
            groups, each, d = fold.heads
            s = (0.25 + 4 * torch.rand(groups, 1, d, generator=draw)).expand(groups, each, d).flatten()
        fold.apply(s)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, tensors[n][: len(p)])}
    expected = sum(len(fold.weights) + len(fold.also) for fold in folds)
    assert len(changed) >= expected >= (2 if name == "olmo2" else 3) * config.num_layers
    assert (model.full_logits(tokens) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.no_grad()
def test_scales_save_what_meets_large_activations():
    """A model with a few large channels, as trained ones have: with scales 4 bits lose less of the products."""
    config, tensors = weights("llama2")
    for n in range(config.num_layers):
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            tensors[f"decoder.layers.{n}.{norm}.weight"] = tensors[f"decoder.layers.{n}.{norm}.weight"].clone()
            tensors[f"decoder.layers.{n}.{norm}.weight"][::32] *= 20
    report = scale_by_activations(build(config, tensors), ids(4, 32, 1), INT4)
    assert len(report) == 4 * config.num_layers and all(error <= plain for _, error, plain in report)
    assert all(error < 0.75 * plain for name, error, plain in report if name.endswith(("qkv", "fc1")))


@pytest.mark.slow
def test_the_command_calibrates_and_tells_the_perplexity(tmp_path, capsys):
    import transformers

    publish("qwen3", tmp_path / "whole")
    text, calibration = a_text(tmp_path / "text.txt"), a_text(tmp_path / "calibration.txt", 1)
    quantise(
        tmp_path / "whole", "--save", tmp_path / "small", "--scheme", "int4", "--group-size", 32, "--text", text,
        "--calibration", calibration, "--seq-length", 20,
    )  # fmt: skip
    said = capsys.readouterr().out
    tokens = pieces(text, HuggingFaceTokenizer(tmp_path / "whole"), 20)
    assert tokens.shape == (15, 20)
    before = math.exp(theirs("qwen3")(tokens, labels=tokens).loss.item())
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    after = math.exp(small(tokens, labels=tokens).loss.item())
    numbers = [float(word) for word in said.split("perplexity")[1].split() if word.replace(".", "").isdigit()]
    assert numbers == pytest.approx([before, after], abs=2e-4) and before != after
    assert f"scales of {4 * theirs('qwen3').config.num_hidden_layers} places" in said
    again = load(open_model(tmp_path / "small"), Mesh.serial(), "fp32")
    assert perplexity(again, tokens) == pytest.approx(after, rel=1e-5)


# ----------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(tmp_path):
    whole = publish("llama2", tmp_path / "whole")
    gpt2 = publish("gpt2", tmp_path / "gpt2")
    quantise(whole, "--save", tmp_path / "small", "--scheme", "int8")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([gpt2, "--scheme", "int8"], ConfigError, "Conv1D"),
        ([tmp_path / "small", "--scheme", "int8"], ConfigError, "quantised already"),
        ([whole, "--scheme", "int4"], ConfigError, "--group-size 32"),
        ([whole, "--scheme", "int4", "--group-size", 12], ConfigError, "multiple of 8"),
        ([whole, "--scheme", "int8", "--calibration", empty], ConfigError, "means nothing"),
        ([whole, "--scheme", "int4", "--group-size", 32, "--calibration", empty], DataError, "0 tokens"),
        ([whole, "--scheme", "fp8", "--text", empty, "--seq-length", 1000], ConfigError, "positions"),
    ]
    for words, kind, told in cases:
        with pytest.raises(kind) as error:
            quantise(*words, "--save", tmp_path / "not")
        assert told in str(error.value), words
        assert not (tmp_path / "not").exists()


def test_other_quantised_folders_and_damaged_ones_are_refused_by_name(tmp_path):
    quantise(publish("llama2", tmp_path / "whole"), "--save", tmp_path / "small", "--scheme", "int8")
    config = tmp_path / "small" / "config.json"
    keys = json.loads(config.read_text())

    def told(kind: type[Exception], **changes: Any) -> str:
        config.write_text(json.dumps(keys | {"quantization_config": keys["quantization_config"] | changes}))
        with pytest.raises(kind) as error:
            open_model(tmp_path / "small")
        return str(error.value)

    (group,) = keys["quantization_config"]["config_groups"].values()

    def weights_with(**changes: Any) -> dict[str, Any]:
        return {"g": group | {"weights": group["weights"] | changes}}

    assert "'gptq'" in told(ConfigError, quant_method="gptq")
    assert "input_activations" in told(ConfigError, config_groups={"g": group | {"input_activations": {"num_bits": 8}}})
    assert "symmetric=False" in told(ConfigError, config_groups=weights_with(symmetric=False))
    assert "2 groups" in told(ConfigError, config_groups={"g": group, "h": group})
    assert "strategy='tensor'" in told(ConfigError, config_groups=weights_with(strategy="tensor"))
    assert "weight_packed has shape" in told(CheckpointError, config_groups=weights_with(num_bits=4))
    config.write_text(json.dumps(keys))
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        open_model(tmp_path / "small")
    del keys["quantization_config"]
    config.write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="weight_packed is quantised, and config.json has no"):
        open_model(tmp_path / "small")


def test_a_convolution_is_no_matrix():
    config, _ = weights("nemotron_h")
    matrices, kept = linear_weights(config, "nemotron_h")
    assert not any("conv1d" in name for name in (*matrices, *kept)) and any("in_proj" in name for name in matrices)
