"""The tasks after pre-training: what `minimegatron sft`, `dpo`, ... ask for beside what every run asks for.

A task is a section of a run. Its fields are flags of its command alone, and a run that goes on must have those of its
checkpoint, as for every other section (`config/fields`). Names are Megatron's where Megatron has the field (`grpo_...`,
`rl_...`), else TRL's.

Megatron-LM: `_add_rl_args` in `megatron/training/arguments.py`; TRL: `SFTConfig`, `DPOConfig`, `GRPOConfig`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from minimegatron.config.fields import HOW, RUN, Config, elsewhere, free, opt
from minimegatron.errors import require

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo")
LAYOUT = free("how the same answers are drawn")
TEACHER = free("where the teacher lies")
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
class VLMConfig(Config):
    """Conversations about pictures: the loss of the assistant's tokens."""

    examples: str | None = opt(
        RUN, None, "in place of files: pictures that the program draws, with questions about them", (None, "drawn")
    )
    chat_template: str | None = opt(TEMPLATE, None, "Jinja file in place of the tokenizer's chat template")
    picture_max_tokens: int = opt(RUN, 1280, "a larger picture of a file is made smaller", least=4)


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


@dataclasses.dataclass(frozen=True)
class RewardConfig(ConversationConfig):
    """A reward model: a number for an answer, larger for the chosen one of a pair."""

    center_rewards_coefficient: float = opt(RUN, 0.0, "weight of (r_w + r_l)^2, which keeps rewards near 0", least=0.0)


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Config):
    """Answers that a model draws for its own training, and the engine that draws them."""

    max_completion_length: int = opt(RUN, 16, "most tokens of an answer that is drawn", least=1)
    rl_inference_tensor_model_parallel_size: int = opt(LAYOUT, 1, "of the engine's layout on the same ranks", least=1)
    rl_inference_pipeline_model_parallel_size: int = opt(LAYOUT, 1, "of the engine's layout", least=1)
    rl_inference_expert_model_parallel_size: int = opt(LAYOUT, 1, "of the engine's layout", least=1)
    rl_inference_dtype: str | None = opt(
        RUN, None, "dtype of the engine's weights; default the trainer's", (None, "fp32", "bf16", "fp16")
    )
    rl_max_num_seqs: int = opt(LAYOUT, 64, "answers that an engine draws at once", least=1)


@dataclasses.dataclass(frozen=True)
class DistillConfig(RolloutConfig, ConversationConfig):
    """Distillation: a student learns the distribution of a teacher over the next token.

    It learns from the answers of the lines, or with --lmbda on answers to their prompts that it draws itself before
    each step, by an engine on the same ranks. Both models have the run's layout and one vocabulary.
    """

    teacher: str = opt(TEACHER, "", "folder of the teacher: a published model, or checkpoints")
    lmbda: float = opt(
        RUN,
        0.0,
        "share of the rows whose answers the student draws itself: 0 learns from the answers that are given, 1 is "
        "on-policy distillation",
        least=0.0,
    )
    beta: float = opt(
        RUN,
        0.0,
        "the divergence: 0 is KL(teacher || student), which covers all that the teacher may say, 1 is KL(student || "
        "teacher), which seeks what it says most, between them lies the generalised Jensen-Shannon divergence",
        least=0.0,
    )
    distill_temperature: float = opt(RUN, 1.0, "of both distributions, and of the student's draws", above=0.0)
    distill_label_weight: float = opt(RUN, 0.0, "share of the labels' cross entropy in the loss", least=0.0, below=1.0)
    distill_chunk: int = opt(HOW, 1024, "tokens of which the teacher's logits are held at once", least=1)

    def _check(self) -> None:
        require(bool(self.teacher), "distillation without a teacher", "--teacher FOLDER")
        for name in ("lmbda", "beta"):
            require(getattr(self, name) <= 1.0, f"{name} is {getattr(self, name)}", "a number from 0 to 1")
        require(
            not (self.lmbda and self.distill_label_weight),
            f"distill_label_weight {self.distill_label_weight} with lmbda {self.lmbda}: the labels of an answer that "
            "the student drew are its own",
            "--distill-label-weight 0, or --lmbda 0",
        )


@dataclasses.dataclass(frozen=True)
class GRPOConfig(RolloutConfig):
    """Reinforcement learning from rewards: the answers of a group to one prompt are compared with each other."""

    environment: str = opt(RUN, "sums", "what is asked and rewarded: sums, format, guess, code, or MODULE:FUNCTION")
    chat_template: str | None = opt(TEMPLATE, None, "Jinja file in place of the tokenizer's chat template")
    grpo_prompts_per_step: int = opt(RUN, 32, "prompts of a rollout", least=1)
    grpo_group_size: int = opt(RUN, 8, "answers to each prompt", least=2)
    grpo_iterations: int = opt(RUN, 1, "how often the answers of a rollout are learned from", least=1)
    grpo_clamp_eps_lower: float = opt(RUN, 0.2, "the ratio is clipped below 1 by so much", above=0.0, below=1.0)
    grpo_clamp_eps_upper: float = opt(RUN, 0.2, "and above 1 by so much; 0.28 is DAPO's clip-higher", above=0.0)
    grpo_delta: float | None = opt(RUN, None, "where the advantage is negative the ratio is limited, too", above=1.0)
    grpo_kl_beta: float = opt(RUN, 0.0, "weight of the divergence from the reference, the model as loaded", least=0.0)
    grpo_kl_in: str = opt(RUN, "loss", "where it is subtracted", ("loss", "reward"))
    grpo_entropy_term_weight: float = opt(RUN, 0.0, "weight of the entropy, which is raised", least=0.0)
    grpo_default_temperature: float = opt(RUN, 1.0, "of the draws, and of all log-probabilities", above=0.0)
    grpo_default_top_p: float = opt(RUN, 1.0, "of the draws", above=0.0)
    grpo_loss_type: str = opt(RUN, "dapo", "what is divided by what (posttraining/policy)", LOSS_TYPES)
    importance_sampling_level: str = opt(RUN, "token", "a ratio for each token, or GSPO's one", ("token", "sequence"))
    scale_rewards: str = opt(RUN, "group", "what advantages are divided by", ("group", "batch", "none"))
    rl_importance_sampling_mode: str | None = opt(
        RUN,
        None,
        "correct for the engine's slightly other probabilities",
        (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    rl_importance_sampling_truncation_coef: float = opt(RUN, 2.0, "limit of that correction", above=0.0)


@dataclasses.dataclass(frozen=True)
class PPOConfig(GRPOConfig):
    """Reinforcement learning from rewards, with a value head that says what to expect."""

    grpo_group_size: int = opt(RUN, 1, "answers to each prompt", least=1)
    ppo_gamma: float = opt(RUN, 1.0, "discount of later rewards", above=0.0)
    ppo_lambda: float = opt(RUN, 0.95, "discount of later surprises: 0 trusts the values, 1 the rewards", least=0.0)
    ppo_value_loss_coef: float = opt(RUN, 0.1, "weight of the value head's loss", least=0.0)
    ppo_cliprange_value: float = opt(RUN, 0.2, "how far a value may move from the old one", above=0.0)
    ppo_whiten_advantages: bool = opt(RUN, True, "advantages of a rollout get mean 0 and variance 1")


TASKS: dict[str, Any] = {
    "sft": SFTConfig,
    "vlm": VLMConfig,
    "dpo": DPOConfig,
    "reward": RewardConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "distill": DistillConfig,
}
