"""Tiny models of every family for the tests of generation, as Hugging Face makes them and as ours."""

from __future__ import annotations

import functools
from typing import Any

import torch

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.config import TransformerConfig
from minimegatron.models.decoder import GPTModel
from tests.inference.ranked import build
from tests.models.test_huggingface import EXPERTS, FAMILIES, hf_model

NAMES = [*FAMILIES, *EXPERTS]


@functools.cache
def theirs(name: str) -> Any:
    """Hugging Face's model, which never stops by itself."""
    model = hf_model(name)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def weights(name: str) -> tuple[TransformerConfig, dict[str, torch.Tensor]]:
    """The same model as our config and logical tensors, which travel to ranks."""
    model = theirs(name)
    family, config = config_from_huggingface(model.config.to_dict())
    return config, state_from_huggingface(model.state_dict(), config, family)


@functools.cache
def ours(name: str) -> GPTModel:
    """Our model on one rank. Shared by tests: nobody changes it."""
    return build(*weights(name))
