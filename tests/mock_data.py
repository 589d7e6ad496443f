"""Trainers whose mock data has a handful of documents: Megatron's 100,000 take half a second to shuffle, every time."""

from __future__ import annotations

from typing import Any
from unittest import mock

from minimegatron.data.gpt_dataset import MockGPTLowLevelDataset
from minimegatron.training.trainer import Trainer


def small_trainer(*args: Any, **options: Any) -> Trainer:
    """A `Trainer`; what `--mock-data` gives it has 300 documents (some 600,000 tokens)."""
    with mock.patch.object(MockGPTLowLevelDataset, "num_documents", 300):
        return Trainer(*args, **options)
