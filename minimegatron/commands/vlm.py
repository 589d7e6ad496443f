"""`minimegatron vlm`: fine-tune a model that sees on conversations about pictures.

    minimegatron vlm --preset laptop-vlm --examples drawn --seq-length 64 --train-iters 1000 --lr 2e-3 --save runs/sees
    minimegatron vlm --load Qwen2.5-VL-3B --data-path chats.jsonl --freeze 'vision_model.*' --train-iters 500 --lr 1e-5

`--freeze` names the parts that do not learn: `vision_model.*`, `vision_projection.*`, and the language model, which is
`decoder.* embedding.* output_layer.*`. All flags of `minimegatron train` are flags here, the layouts among them. The
form of a line: `posttraining/vlm`.
"""

from __future__ import annotations

import functools

from minimegatron.commands import pretrain_gpt

main = functools.partial(pretrain_gpt.main, task="vlm")
