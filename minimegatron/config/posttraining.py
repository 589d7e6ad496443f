"""The tasks after pre-training: what `minimegatron sft`, `dpo`, ... ask for beside what every run asks for.

A task is a section of a run. Its fields are flags of its command alone, and a run that goes on must have those of its
checkpoint, as for every other section (`config/fields`). Names are Megatron's where Megatron has the field (`grpo_...`,
`rl_...`), else TRL's.

Megatron-LM: `_add_rl_args` in `megatron/training/arguments.py`; TRL: `SFTConfig`, `DPOConfig`, `GRPOConfig`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from minimegatron.config.fields import RUN, Config, elsewhere, opt

TEMPLATE = elsewhere("training data: the ids and masks that the template makes of the conversations")


@dataclasses.dataclass(frozen=True)
class ConversationConfig(Config):
    """Conversations, and how they become ids."""

    examples: str | None = opt(
        RUN,
        None,
        "data that every machine has, in place of files: questions about the docstrings of Python's standard library, "
        "or sums",
        (None, "docstrings", "arithmetic"),
    )
    chat_template: str | None = opt(TEMPLATE, None, "Jinja file in place of the tokenizer's chat template")


@dataclasses.dataclass(frozen=True)
class SFTConfig(ConversationConfig):
    """Supervised fine-tuning: the loss of the assistant's tokens."""


@dataclasses.dataclass(frozen=True)
class DPOConfig(ConversationConfig):
    """Direct preference optimisation: of two answers the chosen one becomes more likely than the rejected one."""

    beta: float = opt(RUN, 0.1, "how far the policy may move from the reference: larger is nearer", above=0.0)
    dpo_loss_type: str = opt(
        RUN,
        "sigmoid",
        "loss of a pair; ipo divides each log-ratio by its answer's length, as TRL, ipo_sum does not, as OpenRLHF",
        ("sigmoid", "ipo", "ipo_sum", "hinge"),
    )
    label_smoothing: float = opt(
        RUN, 0.0, "share of the pairs whose labels are taken to be the wrong way round (cDPO)", least=0.0, below=0.5
    )


TASKS: dict[str, Any] = {"sft": SFTConfig, "dpo": DPOConfig}
