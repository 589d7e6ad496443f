"""How this run cuts a batch out of the stream. The losses of tokens are the model's: in fp32, all positions at once.

The batch is that of the start.
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
