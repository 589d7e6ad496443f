"""`minimegatron ppo`: reinforcement learning with a value head.

    minimegatron ppo --load runs/sft --use-checkpoint-args --finetune --environment sums --grpo-prompts-per-step 512
        --global-batch-size 256 --micro-batch-size 64 --train-iters 200 --lr 3e-4 --grpo-kl-beta 0.05

All flags of `minimegatron grpo` are flags here; `--grpo-kl-in reward` subtracts the divergence from each token's reward
(`posttraining/ppo`).
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="ppo")
