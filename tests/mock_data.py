"""Trainers whose mock data has a handful of documents: Megatron's 100,000 take half a second to shuffle, every time."""

from __future__ import annotations

from typing import Any
from unittest import mock

from minimegatron.data.gpt_dataset import MockGPTLowLevelDataset
from minimegatron.training.build import build_trainer
from minimegatron.training.step import ForwardStep
from minimegatron.training.task import Task
from minimegatron.training.trainer import Trainer


def few_documents() -> Any:
    """Inside, `--mock-data` has 300 documents (some 600,000 tokens)."""
    return mock.patch.object(MockGPTLowLevelDataset, "num_documents", 300)


def small_trainer(*args: Any, forward_step: ForwardStep | None = None, **options: Any) -> Trainer:
    """A `Trainer` with few documents; with another forward pass and loss, if one is given."""
    if forward_step is not None:
        options["task"] = type("Task", (Task,), {"forward_step": staticmethod(forward_step)})
    with few_documents():
        return build_trainer(*args, **options)
