"""Two families that the package has never heard of: an encoder with an objective of its own, and a model that sees by
an encoder of its own. Each is a description and the classes that it names; `registered` makes both known.

    toy-encoder    a Llama whose tokens see each other in both directions; single tokens are hidden, and predicted
    toy-vlm        a Llama that sees the mean colour of each patch, through two layers and one matrix
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.config.vision import CHANNELS, TOWERS, Tower, register_tower
from minimegatron.data.gpt_dataset import Batch, Dataset, Objective, SampleDataset
from minimegatron.data.tokenizer import Tokenizer
from minimegatron.errors import ConfigError, require
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.linear import linear
from minimegatron.layers.param import Init, ParamLayout, new_parameter
from minimegatron.models.decoder import GPTModel
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import FAMILIES, PRESETS, Family, Row, named, register
from minimegatron.models.families.llama import LLAMA
from minimegatron.models.families.llama_like import sizes


class Hidden(Objective):
    """Three of ten tokens are hidden by an id behind the tokenizer's, and predicted."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.blank, self.vocab_size, self.seed = tokenizer.vocab_size, tokenizer.vocab_size + 1, seed

    def of_texts(self, texts: Dataset) -> Dataset:
        return HiddenDataset(texts, self)


class HiddenDataset(SampleDataset):
    def __init__(self, texts: Dataset, objective: Hidden) -> None:
        self.texts, self.objective = texts, objective
        self.read_epochs, self.begun = texts.read_epochs, texts.begun

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, samples: Sequence[int]) -> Batch:
        batch = self.texts.batch(samples)
        draws = [np.random.default_rng((self.objective.seed, k)).random(batch["tokens"].shape[1]) for k in samples]
        hidden = torch.from_numpy(np.stack(draws)) < 0.3
        tokens = torch.where(hidden, self.objective.blank, batch["tokens"])
        return {**batch, "labels": batch["tokens"], "tokens": tokens, "loss_mask": hidden.float()}


class TwoWay(GPTModel):
    """A decoder's layers and head without a causal mask."""

    predicts_next = False
    added_ids = 1

    @classmethod
    def objective(cls, run: RunConfig, tokenizer: Tokenizer) -> Hidden:
        return Hidden(tokenizer, run.training.seed)

    @classmethod
    def check_run(cls, run: RunConfig) -> None:
        require(run.task is None, f"minimegatron {run.task_name} of a TwoWay", "minimegatron train")

    def check_generation(self) -> None:
        raise ConfigError("generation by a TwoWay", fix="a decoder")

    def forward(self, tokens: Tensor, position_ids: Any = None, labels: Any = None, **options: Any) -> Any:
        positions = self.positions_of(tokens, position_ids)
        assert self.rotary is not None, "the family has RoPE"
        mask = AttentionMask(causal=False, document_ids=options.get("document_ids"))
        hidden = self._first_hidden(tokens, positions, options.get("inputs"))
        hidden = self.decoder(hidden, AttentionContext(self.rotary(positions), mask))
        if not self.post_process:
            return {"hidden": hidden}
        return (
            self._outputs(hidden, options.get("outputs", "logits")) if labels is None else self._losses(hidden, labels)
        )


ENCODER = Family(
    name="toy_encoder",
    architecture="ToyEncoder",
    fields={**like.FIELDS, "model_class": "tests.extension.families:TwoWay"},
    presets={"toy-encoder": sizes(2, 32, 4, 65, num_query_groups=2, ffn_hidden_size=48)},
    defaults=LLAMA.defaults,
    parts=LLAMA.parts,
    tensors=like.DENSE,
)


class MeanColours(nn.Module):
    """[n, 3 T p p] -> the mean of each channel -> [n, 1, h_v]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape = (config.vision_hidden_size, CHANNELS)
        self.weight = new_parameter(ParamLayout(shape, init=Init(std=0.5), partial="sequence"), config.dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        colours = pixels.unflatten(1, (CHANNELS, -1)).mean(-1)
        return linear(colours.to(self.weight.dtype), self.weight)[:, None]


class OneMatrix(nn.Module):
    """[n, 1, h_v] (or [n/t, 1, h_v]) -> [n, h] on every rank."""

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        self.tp = mesh.tp if mesh.sequence_parallel else None
        shape = (config.hidden_size, config.vision_hidden_size)
        self.weight = new_parameter(ParamLayout(shape, init=Init(std=0.1), partial="sequence"), config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = linear(x, self.weight)
        return (rows if self.tp is None else c.gather_from_sequence_region(rows, self.tp))[:, 0]


COLOURS = Tower(
    fields={
        "normalization": "RMSNorm",
        "activation": "gelu",
        "position_embedding_type": "none",
        "add_bias_linear": False,
    },
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    embedding="tests.extension.families:MeanColours",
    projector="tests.extension.families:OneMatrix",
)
_OF_TOWER = {
    "vision_num_layers": 2, "vision_hidden_size": 32, "vision_num_attention_heads": 4, "vision_ffn_hidden_size": 48,
    "vision_patch_size": 8, "vision_patches_per_sample": 16, "image_token_id": 3,
}  # fmt: skip
_KEYS = {f"tower_{name}": name for name in _OF_TOWER if name != "vision_patches_per_sample"}
_L, _T = "vision_model.decoder.layers.{}.", "tower.{}."
VLM = Family(
    name="toy_vlm",
    architecture="ToyVLM",
    fields={
        **like.FIELDS,
        "vision_model_type": "colours",
        "vision_spatial_merge_size": 1,
        "vision_temporal_patch_size": 1,
    },
    presets={"toy-vlm": sizes(2, 32, 4, 512, num_query_groups=2, ffn_hidden_size=48, **_OF_TOWER)},
    defaults={**LLAMA.defaults, **dict.fromkeys(_KEYS)},
    parts=(*LLAMA.parts, named(_KEYS)),
    tensors=(
        *like.DENSE,
        *(
            Row(ours, theirs, how, on="vision")
            for ours, theirs, how in (
                ("vision_model.conv1.weight", ("tower.colours",), "stack"),
                ("vision_projection.weight", ("tower.matrix",), "stack"),
                (_L + "input_layernorm.weight", (_T + "norm1",), "stack"),
                (_L + "pre_mlp_layernorm.weight", (_T + "norm2",), "stack"),
                (_L + "self_attention.linear_qkv.weight", tuple(_T + x for x in "qkv"), "pack"),
                (_L + "self_attention.linear_proj.weight", (_T + "o",), "stack"),
                (_L + "mlp.linear_fc1.weight", (_T + "up",), "stack"),
                (_L + "mlp.linear_fc2.weight", (_T + "down",), "stack"),
            )
        ),
    ),
)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Both are known in the block alone: other tests go through all families."""
    register(ENCODER)
    register_tower("colours", COLOURS)
    register(VLM)
    try:
        yield
    finally:
        del TOWERS["colours"]
        for family in (ENCODER, VLM):
            del FAMILIES[family.name]
            for name in family.presets:
                del PRESETS[name]
