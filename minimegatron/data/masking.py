"""Which labels count, where each token stands, and which document it belongs to.

A sample of s tokens is cut out of a stream of documents, so it may hold the end of one and the beginning of the next.
Three options (Megatron's flags) say how much the model may know of that; let d be the ids, E the end-of-document id::

    tokens                         a  b  E  c  d  e  E  f
    document_ids                   0  0  0  1  1  1  1  2      the E belongs to the document that it ends
    position_ids                   0  1  2  3  4  5  6  7
      with reset_position_ids      0  1  2  0  1  2  3  0
    loss_mask                      1  1  1  1  1  1  1  1
      with eod_mask_loss           1  1  0  1  1  1  0  1      predicting f from E is guessing

With `reset_attention_mask` a token attends only to its own document: `document_ids` are returned, and
`layers/attention/mask.cu_seqlens` turns them into what variable-length attention kernels take. (Megatron returns the
[1, s, s] mask, s^2 bytes a sample.)
Padding never counts: where the *label* is the pad id the mask is 0, and pad ids become 0, which any embedding has.

In Megatron-LM: `_get_ltor_masks_and_position_ids` in `megatron/core/datasets/gpt_dataset.py`, a loop over samples.
"""

from __future__ import annotations

import torch

from minimegatron.data.tokenizer import NO_PAD

Batch = dict[str, torch.Tensor]


def make_batch(
    text: torch.Tensor,
    eod: int,
    pad: int = NO_PAD,
    *,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> Batch:
    """Inputs, labels and masks of a batch.

    Args:
        text: [b, s + 1] int64 ids.
        eod, pad: ids; `pad` differs from `eod` (see `tokenizer`).

    Returns:
        tokens, labels, position_ids: [b, s] int64; loss_mask: [b, s] float32; and with `reset_attention_mask`
        document_ids: [b, s] int64, counted from 0 in each sample.
    """
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    if eod_mask_loss:
        loss_mask[tokens == eod] = 0.0
    if reset_position_ids or reset_attention_mask:
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:, 1:] = tokens[:, :-1] == eod
        if reset_position_ids:
            batch["position_ids"] = position_ids - (position_ids * begins).cummax(dim=1).values
        if reset_attention_mask:
            batch["document_ids"] = begins.cumsum(dim=1)
    if pad != NO_PAD:
        loss_mask[labels == pad] = 0.0
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
    return batch
