"""Trainers whose mock data has a handful of documents: Megatron's 100,000 take half a second to shuffle, every time."""

from __future__ import annotations

from typing import Any
from unittest import mock

from minimegatron.data.gpt_dataset import MockGPTLowLevelDataset
from minimegatron.training.build import build_trainer
from minimegatron.training.trainer import Trainer


def few_documents() -> Any:
    """Inside, `--mock-data` has 300 documents (some 600,000 tokens)."""
    return mock.patch.object(MockGPTLowLevelDataset, "num_documents", 300)


def small_trainer(*args: Any, **options: Any) -> Trainer:
    """A `Trainer` with few documents."""
    with few_documents():
        return build_trainer(*args, **options)
