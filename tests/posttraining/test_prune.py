"""A pruned model is the model without its least used units: nothing else changes, and transformers reads it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.checkpoint.conversion import logical_tensors, open_model
from minimegatron.checkpoint.sources import InMemory
from minimegatron.commands.convert import main as convert
from minimegatron.commands.prune import main
from minimegatron.commands.quantize import load_alone
from minimegatron.config import TransformerConfig
from minimegatron.config.same_model import differing
from minimegatron.errors import ConfigError
from minimegatron.posttraining import importance, prune
from tests.checkpoint.test_export import write_tokenizer
from tests.inference.models import theirs
from tests.inference.ranked import ids, logits_of_folder
from tests.inference.test_quantize import a_text, logits_in_transformers
from tests.posttraining.test_tasks import TP, curve, trainer_of
from tests.thorough import SLOW, mostly_thorough


def flags(targets: dict[str, int]) -> list[str]:
    return [word for name, size in targets.items() for word in (f"--target-{name.replace('_', '-')}", str(size))]


def pruned(model: Any, folder: Path, targets: dict[str, int], *words: str) -> tuple[Path, Path]:
    """Folders of a model of transformers, and of what `minimegatron prune` makes of it."""
    model.save_pretrained(folder / "whole")
    write_tokenizer(folder / "whole")
    text = a_text(folder / "text.txt")
    assert main([str(folder / "whole"), "--save", str(folder / "small"), "--calibration", str(text), "--seq-length",
                 "30", *flags(targets), *words]) == 0  # fmt: skip
    return folder / "whole", folder / "small"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    model = open_model(folder)
    return {name: model.weights.read(name) for name in model.weights.tensors}


def sizes_of(name: str) -> dict[str, int]:
    config = open_config(name)
    left_out = {"ffn_hidden_size"} if config.num_experts else set()
    return {size: getattr(config, size) for size in prune.TARGETS if size not in left_out}


def open_config(name: str) -> TransformerConfig:
    from minimegatron.checkpoint.hf_config import config_from_huggingface

    return config_from_huggingface(theirs(name).config.to_dict())[1]


NAMES = ["llama2", "llama2-mha-bias", "gpt2", "qwen2.5-tied-mqa", "qwen3", "gemma2", "olmo2", "mixtral", "qwen3_moe",
         "qwen2_moe", "deepseek_v3"]  # fmt: skip


@pytest.mark.parametrize("name", mostly_thorough(NAMES, ("llama2", "qwen2_moe").__contains__))
def test_pruning_nothing_is_the_identity_to_the_bit(tmp_path: Path, name: str) -> None:
    whole, small = pruned(theirs(name), tmp_path, sizes_of(name))
    before, after = tensors_of(whole), tensors_of(small)
    assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)
    assert differing(open_model(whole).config, open_model(small).config) == []


# ------------------------------------------------------------------------------------ units that are 0


def without_neurons(model: Any) -> None:
    for layer, neurons in zip(model.model.layers, ([5, 17, 90], [0, 1, 2]), strict=True):
        layer.mlp.up_proj.weight[neurons] = 0.0


def without_groups(model: Any) -> None:
    for layer, group in zip(model.model.layers, (0, 1), strict=True):
        layer.self_attn.v_proj.weight[group * 16 : (group + 1) * 16] = 0.0


def without_channels(model: Any) -> None:
    gone = [0, 3, 30, 31, 32, 50, 61, 63]
    model.model.embed_tokens.weight[:, gone] = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[gone] = 0.0
        layer.mlp.down_proj.weight[gone] = 0.0


def without_a_layer(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()


ZEROS: dict[str, tuple[Callable[[Any], None], dict[str, int], list[str]]] = {
    "neurons": (without_neurons, {"ffn_hidden_size": 93}, []),
    "groups": (without_groups, {"num_query_groups": 1}, []),
    "channels": (without_channels, {"hidden_size": 56}, []),
    "layers": (without_a_layer, {"num_layers": 1}, []),
    "layers by their loss": (without_a_layer, {"num_layers": 1}, ["--layer-importance", "loss"]),
}


@functools.cache
def llama() -> Any:
    """A Llama of which epsilon is no part of any sum."""
    model = copy.deepcopy(theirs("llama2"))
    model.config.rms_norm_eps = 1e-12
    return model


@pytest.mark.parametrize("units", ZEROS)
def test_units_that_do_nothing_are_those_that_go(tmp_path: Path, units: str) -> None:
    spoil, targets, words = ZEROS[units]
    model = copy.deepcopy(llama())
    with torch.no_grad():
        spoil(model)
    whole, small = pruned(model, tmp_path, targets, *words)
    config = open_model(small).config
    assert {name: getattr(config, name) for name in targets} == targets
    wanted = logits_of_folder(0, 1, whole)
    assert (logits_of_folder(0, 1, small) - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_heads_of_a_model_without_groups(tmp_path: Path) -> None:
    """With biases, which belong to the heads as well."""
    model = copy.deepcopy(theirs("llama2-mha-bias"))
    with torch.no_grad():
        for layer, head in zip(model.model.layers, (3, 1), strict=True):
            for part in (layer.self_attn.v_proj.weight, layer.self_attn.v_proj.bias):
                part[head * 16 : (head + 1) * 16] = 0.0
    whole, small = pruned(model, tmp_path, {"num_attention_heads": 3})
    wanted = logits_of_folder(0, 1, whole)
    assert (logits_of_folder(0, 1, small) - wanted).abs().max() < 1e-6 * wanted.abs().max()


# ------------------------------------------------------------------------------------- scores and masks


def text_of(folder: Path) -> torch.Tensor:
    from minimegatron.commands.quantize import pieces
    from minimegatron.data.tokenizer import HuggingFaceTokenizer

    return pieces(folder / "text.txt", HuggingFaceTokenizer(folder / "whole"), 30)


@torch.no_grad()
def test_scores_are_those_of_transformers_activations(tmp_path: Path) -> None:
    model = theirs("llama2")
    whole, _ = pruned(model, tmp_path, {"ffn_hidden_size": 90})
    tokens = text_of(tmp_path)
    scores = importance.measure(load_alone(open_model(whole)), tokens)
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, args, output, name=name: seen.update({name: args[0], f"{name}=": output})
        )
        for name, module in model.named_modules()
        if name.endswith(("o_proj", "down_proj", "norm")) or name.count(".") == 2
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    flat = {name: (x[0] if isinstance(x, tuple) else x).double().flatten(0, 1) for name, x in seen.items()}
    norms = [name for name in flat if name.endswith("norm=")]
    assert len(norms) == 5
    hidden = sum(flat[name].square().mean(0).sqrt() for name in norms)
    assert torch.allclose(scores.hidden, hidden, rtol=1e-5)
    final = flat["model.norm"].square()
    assert torch.allclose(scores.shares["decoder.final_layernorm"], (final / final.mean(1, keepdim=True)).mean(0))
    for n in range(2):
        heads = flat[f"model.layers.{n}.self_attn.o_proj"].view(-1, 4, 16).square().sum(-1).mean(0).sqrt()
        ffn = flat[f"model.layers.{n}.mlp.down_proj"].square().mean(0).sqrt()
        influence = 1 - F.cosine_similarity(flat[f"model.layers.{n}"], flat[f"model.layers.{n}="]).mean()
        assert torch.allclose(scores.heads[n], heads, rtol=1e-5) and torch.allclose(scores.ffn[n], ffn, rtol=1e-5)
        assert scores.influence[n] == pytest.approx(influence.item(), rel=1e-5)


@torch.no_grad()
def test_heads_and_neurons_that_go_are_as_if_they_were_0(tmp_path: Path) -> None:
    """One head of each pair that shares a key head, and neurons, of a model with a norm of each head."""
    targets = {"num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 80}
    whole, small = pruned(theirs("qwen3"), tmp_path, targets)
    model = load_alone(open_model(whole))
    config, tokens = model.config, text_of(tmp_path)
    kept = prune.choose(config, prune.sizes_after(config, targets), importance.measure(model, tokens), [])
    for n, layer in model.layers.items():
        assert [head // 2 for head in kept.heads[n].flatten().tolist()] == [0, 1]
        gone = torch.ones(4, dtype=torch.bool).index_fill(0, kept.heads[n].flatten(), False)
        layer.self_attention.linear_proj.weight.view(64, 4, 32)[:, gone] = 0.0
        layer.mlp.linear_fc2.weight[:, torch.ones(96, dtype=torch.bool).index_fill(0, kept.ffn[n], False)] = 0.0
    wanted = model.full_logits(ids(2, 12))
    assert (logits_of_folder(0, 1, small) - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_a_norm_keeps_the_scale_of_what_it_gives(tmp_path: Path) -> None:
    """The channels that go have half of the mean square: without the factor, the others would be sqrt(6/7) as large."""
    config = TransformerConfig(hidden_size=8, num_attention_heads=2, num_layers=1, normalization="RMSNorm")
    shares = torch.tensor([0.5, 1.25, 1.25, 1.25, 0.5, 1.25, 1.0, 1.0], dtype=torch.float64)
    names = ["decoder.layers.0.input_layernorm", "decoder.final_layernorm"]
    scores = importance.Scores({}, {}, shares, dict.fromkeys(names, shares), {0: 0.5})
    kept = prune.choose(config, {**{n: getattr(config, n) for n in prune.TARGETS}, "hidden_size": 6}, scores, [])
    assert kept.hidden is not None and kept.hidden.tolist() == [1, 2, 3, 5, 6, 7]
    assert kept.factors == pytest.approx(dict.fromkeys(names, (7 / 6) ** 0.5))
    for zero_centred in (False, True):
        plain = config.replace(layernorm_zero_centered_gamma=zero_centred)
        weights = {n: torch.full(d.shape, 0.5) for n, d in logical_tensors(plain).items()}
        gamma = prune.Pruned(InMemory(weights), plain, kept).read("decoder.final_layernorm.weight") + zero_centred
        assert gamma.tolist() == pytest.approx([(0.5 + zero_centred) * (7 / 6) ** 0.5] * 6)


# ------------------------------------------------------------------------------------------- folders

ALL = {"hidden_size": 48, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 60, "num_layers": 1}
SMALLER = {
    "llama2": ALL,
    "llama2-mha-bias": {**ALL, "num_query_groups": 2},
    "gpt2": {"ffn_hidden_size": 100, "num_layers": 1},
    "qwen2.5-tied-mqa": {**ALL, "num_attention_heads": 3},
    "qwen3": ALL,
    "gemma2": {name: size for name, size in ALL.items() if name != "hidden_size"},
    "olmo2": {"hidden_size": 48, "ffn_hidden_size": 60, "num_layers": 1},
    "mixtral": {**{name: size for name, size in ALL.items() if name != "ffn_hidden_size"}, "hidden_size": 40},
    "qwen3_moe": {"hidden_size": 48, "num_query_groups": 1, "num_layers": 2},
    "qwen2_moe": {"hidden_size": 48, "num_query_groups": 1},
    "deepseek_v3": {"num_layers": 2},
}


@pytest.mark.parametrize("name", mostly_thorough(NAMES, ("llama2", "qwen3_moe").__contains__))
def test_transformers_computes_the_same_of_a_pruned_folder(tmp_path: Path, name: str) -> None:
    targets = SMALLER[name]
    whole, small = pruned(theirs(name), tmp_path, targets)
    config = open_model(small).config
    assert {n: getattr(config, n) for n in targets} == targets
    assert config.kv_channels == open_model(whole).config.kv_channels
    found = logits_of_folder(0, 1, small)
    assert (found - logits_in_transformers(small)).abs().max() < 1e-5
    assert found.std() > 0.1 and (small / "tokenizer.json").is_file()


@pytest.fixture(scope="session")
def large(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of sums, trained over tp."""
    folder = tmp_path_factory.mktemp("large")
    ranks(2).run(curve, "sft", f"{SUMS} --train-iters 50 --micro-batch-size 16 {TP} --lr 5e-3 --save {folder}")
    return str(folder)


SUMS = (
    "--examples arithmetic --split 90,10 --global-batch-size 16 --swiglu --disable-bias-linear --seq-length 16 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --eval-interval 1000 --eval-iters 4"
)


def divergence_of(line: str) -> tuple[float, float]:
    """The divergence from the teacher before training and after it, on sums that neither has seen."""
    trainer = trainer_of("distill", line)
    before = trainer.evaluate()["divergence"]
    trainer.train()
    after = trainer.evaluate()["divergence"]
    trainer.close()
    return before, after


@pytest.fixture(scope="session")
def small(large: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with fewer channels and neurons."""
    folder = tmp_path_factory.mktemp("small")
    text = folder / "text.txt"
    text.write_text("\n".join(f"{a} + {b} = {a + b}" for a in range(0, 99, 7) for b in range(0, 99, 11)))
    assert main([large, "--save", f"{folder}/run", "--calibration", str(text), "--seq-length", "16",
                 "--target-hidden-size", "24", "--target-ffn-hidden-size", "40"]) == 0  # fmt: skip
    return folder / "run"


@SLOW
def test_a_pruned_checkpoint_is_published(small: Path, tmp_path: Path) -> None:
    """What the run kept beside the weights comes along, but for a description of the larger model."""
    model = open_model(small)
    assert (model.kind, model.config.hidden_size, model.config.ffn_hidden_size) == ("ours", 24, 40)
    convert(["--load", str(small), "--save", f"{tmp_path}/published"])
    assert (tmp_path / "published/tokenizer.json").is_file()
    wanted = logits_of_folder(0, 1, small)
    assert (logits_in_transformers(tmp_path / "published") - wanted).abs().max() < 1e-5 * wanted.abs().max()


@SLOW
@pytest.mark.parametrize("form", mostly_thorough(["", "--lmbda 1 --beta 1 --max-completion-length 6"], [0]))
def test_distillation_mends_a_pruned_checkpoint(large: str, small: Path, form: str) -> None:
    """From given answers or the student's own; the larger model was trained over tp."""
    line = f"{SUMS} --load {small} --use-checkpoint-args --finetune --teacher {large} --micro-batch-size 16"
    sizes = "--hidden-size 24 --ffn-hidden-size 40"
    before, after = divergence_of(f"{line} {sizes} --train-iters 30 --lr 5e-3 {form}")
    assert after < before / 2.5


def test_what_cannot_be_pruned_is_refused(tmp_path: Path) -> None:
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=8, num_query_groups=4)
    several: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
    for model, targets, message in (
        (config, {"hidden_size": 65}, "--target-hidden-size 65, and the model has 64"),
        (config, {"num_layers": 0}, "--target-num-layers 0, and the model has 4"),
        (config, {"num_attention_heads": 6}, "6 heads in 4 groups"),
        (config, {"num_attention_heads": 8, "num_query_groups": 2}, "8 heads in 2 groups"),
        (TransformerConfig(**several), {"num_attention_heads": 6, "num_query_groups": 2}, "every head is a group"),
        (TransformerConfig(**several, lora_rank=4), {"num_layers": 3}, "adapters lie beside the weights"),
        (TransformerConfig(**several, scale_embeddings=True), {"hidden_size": 48}, "multiplies by sqrt"),
        (open_config("mixtral"), {"ffn_hidden_size": 48}, "each of the experts sees a few tokens"),
        (open_config("deepseek_v3"), {"hidden_size": 48}, "latents of multi_latent_attention"),
        (TransformerConfig(**several, attention_output_gate=True), {"num_layers": 3}, "layers of Gated DeltaNet"),
        (open_config("olmo2"), {"num_attention_heads": 2}, "a mean over all heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            prune.sizes_after(model, targets)
    with pytest.raises(ConfigError, match="prune to which size"):
        main([str(tmp_path), "--save", "x", "--calibration", "y"])


def test_layers_take_their_windows_and_experts_with_them() -> None:
    """Which layers have a window or experts is said by number, and numbers move."""
    config = TransformerConfig(num_layers=5, num_attention_heads=4, sliding_window=4, window_attn_skip_freq="2")
    config = config.replace(num_experts=4, moe_layer_freq="[0,1,1,0,1]", add_bias_linear=False)
    small = prune.pruned_config(
        config, {name: getattr(config, name) for name in prune.WIDTHS} | {"num_layers": 3}, prune.Kept((0, 2, 4))
    )
    assert [small.window_of(n) for n in range(3)] == [config.window_of(n) for n in (0, 2, 4)]
    assert small.expert_layers == (False, True, True)
