"""The tasks by the names of their commands."""

from __future__ import annotations

from minimegatron.posttraining.distill import Distill
from minimegatron.posttraining.dpo import DPO
from minimegatron.posttraining.grpo import GRPO
from minimegatron.posttraining.ppo import PPO
from minimegatron.posttraining.reward import Reward
from minimegatron.posttraining.sft import SFT
from minimegatron.posttraining.vlm import VLM
from minimegatron.training.task import Task

TASKS: dict[str, type[Task]] = {
    "sft": SFT,
    "vlm": VLM,
    "dpo": DPO,
    "reward": Reward,
    "grpo": GRPO,
    "ppo": PPO,
    "distill": Distill,
}
