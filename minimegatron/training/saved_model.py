"""What `--load` says that the model is, so that no flag has to; of a published folder it is read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimegatron.checkpoint.hf_config import is_published, read_config
from minimegatron.checkpoint.hf_export import PUBLISHED


def model_fields(load: str | None, use_checkpoint_args: bool, step: int | None) -> dict[str, Any]:
    """What `--load` says that the model is: a published folder always, a checkpoint with `--use-checkpoint-args`.

    A published folder says the fields of kind `MODEL`; a checkpoint says all, those of how its run computed among them.

    Raises:
        CheckpointError: there is nothing that could say it.
    """
    if load is not None and is_published(Path(load)):
        _, config = read_config(Path(load))
        return {name: value for name, value in config.to_dict().items() if name in PUBLISHED}
    if load is None or not use_checkpoint_args:
        return {}
    from minimegatron.checkpoint.ours import config_of

    return config_of(Path(load), step).to_dict()
