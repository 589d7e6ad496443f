"""`minimegatron grpo`: reinforcement learning from the rewards of an environment.

    minimegatron grpo --load runs/sft --use-checkpoint-args --finetune --environment sums --grpo-prompts-per-step 64
        --grpo-group-size 16 --global-batch-size 512 --micro-batch-size 64 --train-iters 200 --lr 3e-4

Answers are drawn by the engine, on the same ranks, in the layout of `--rl-inference-...` (`posttraining/rollouts`).
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="grpo")
