"""`minimegatron distill`: a smaller model learns the next-token distribution of a larger one.

    minimegatron distill --preset laptop-10m --teacher runs/large --data-path chats.jsonl --train-iters 500 --lr 1e-4
    minimegatron distill --load small --use-checkpoint-args --finetune --teacher runs/large --data-path chats.jsonl
        --lmbda 1 --beta 1 --max-completion-length 128 --seq-length 512 --train-iters 500 --lr 1e-5

The first learns from the answers of the file; with `--lmbda` a share of the rows has answers that the student draws
itself before each step, by the engine on the same ranks, in the layout of `--rl-inference-...`; `--beta` says which
divergence. Both models have the run's layout and the same vocabulary (`posttraining/distill`, `on_policy`).
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="distill")
