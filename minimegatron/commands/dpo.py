"""`minimegatron dpo`: learn from pairs of answers, of which one is preferred.

    minimegatron dpo --load runs/sft --use-checkpoint-args --finetune --data-path pairs.jsonl --beta 0.1 --lr 5e-7

A line is `{"prompt": ..., "chosen": ..., "rejected": ...}`, as texts or as lists of messages. The reference is the
model as it is loaded; its log-probabilities are kept, the model is not (`posttraining/dpo`).
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="dpo")
