"""How this run cuts a batch out of the stream. The losses of tokens are the model's: in fp32, all positions at once.

The batch is one gather: b (s + 1) indices, made once, in the place of three writes a token.
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
    rows = stream[torch.tensor(starts)[:, None] + torch.arange(length + 1)]
    tokens = rows[:, :-1].contiguous()
    return {"tokens": tokens, "labels": rows[:, 1:].contiguous(), "loss_mask": (tokens != END).float()}
