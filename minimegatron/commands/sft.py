"""`minimegatron sft`: fine-tune a model on conversations.

    minimegatron sft --load Qwen2.5-0.5B --data-path chats.jsonl --sequence-packing --train-iters 500 --lr 1e-5
    minimegatron sft --load runs/base --use-checkpoint-args --finetune --examples docstrings --train-iters 100 --lr 1e-4

    minimegatron sft --load INT4 --lora-base INT4 --lora-rank 16 --data-path chats.jsonl --save adapters       QLoRA

INT4 is a folder of `minimegatron quantize --scheme int4`, or int8. All flags of `minimegatron train` are flags here,
the layouts among them. Forms of a line: `posttraining/conversations`.
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="sft")
