"""What the class of a run's stages says of the run, before a stage is built (`models/contract.StageClass`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minimegatron.models.chunks import stage_class
from minimegatron.models.spec import spec_from_name

if TYPE_CHECKING:
    from minimegatron.config.run import RunConfig


def class_of_run(run: RunConfig) -> Any:
    """The class of the stages: that of `--spec`, if it names one, else the model's.

    Raises:
        ConfigError: `--spec` or `model_class` names none.
    """
    return stage_class(run.model, spec_from_name(run.spec, run.model))


def has_documents(run: RunConfig) -> bool:
    """Whether samples consist of documents that do not attend to each other; padding is one."""
    return run.data.reset_attention_mask or bool(class_of_run(run).pads)
