"""The two functions of this run that are its own: how a batch is cut out of the stream, and the loss of its tokens.

They are right, and slow. A faster file of yours has to give the same numbers. Leave `token_losses` out, and the model
computes the losses of tokens itself; then the vocabulary may be cut over ranks, too.
"""

from __future__ import annotations

import torch

END = 0  # of a document; what follows it cannot be guessed, so predicting it does not count


def batch(stream: torch.Tensor, starts: list[int], length: int) -> dict[str, torch.Tensor]:
    """Samples of a stream of tokens.

    Args:
        stream: [n] int64, which stays as it is.
        starts: where each of the b samples begins; they may overlap.
        length: s, tokens of a sample; one more is read, for the last label.

    Returns:
        tokens, labels: [b, s] int64; loss_mask: [b, s] float32, 0 where the token is `END`, else 1.
    """
    tokens = torch.zeros(len(starts), length, dtype=torch.int64)
    labels = torch.zeros(len(starts), length, dtype=torch.int64)
    loss_mask = torch.zeros(len(starts), length, dtype=torch.float32)
    for i, start in enumerate(starts):
        for j in range(length):
            tokens[i, j] = stream[start + j]
            labels[i, j] = stream[start + j + 1]
            if tokens[i, j] != END:
                loss_mask[i, j] = 1.0
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p of each label.

    Args:
        logits: [b, s, V] float32.
        labels: [b, s] int64.

    Returns:
        [b, s] float32.
    """
    losses = []
    for j in range(labels.shape[1]):
        chances = torch.softmax(logits[:, j].double(), dim=-1)
        chosen = torch.nn.functional.one_hot(labels[:, j], logits.shape[-1]).double()
        losses.append(-(chances.log() * chosen).sum(dim=-1))
    return torch.stack(losses, dim=1).float()
