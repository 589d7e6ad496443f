"""`minimegatron distill`: a smaller model learns the next-token distribution of a larger one, on given conversations.

    minimegatron distill --preset laptop-10m --teacher runs/large --data-path chats.jsonl --train-iters 500 --lr 1e-4

Both models have the run's layout and the same vocabulary (`posttraining/distill`).
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="distill")
