"""`minimegatron reward`: train a reward model on pairs of answers, of which one is preferred.

    minimegatron reward --load runs/sft --use-checkpoint-args --finetune --data-path pairs.jsonl --lr 1e-5

Lines are those of `minimegatron dpo`. The model gets a value head; the score of an answer is its number at the last
token (`posttraining/reward`).
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="reward")
