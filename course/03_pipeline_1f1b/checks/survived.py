"""Lab 03, which microbatches are in a sum: the answer, and the answers of programs that search for it in another way.

In the three vectors of the text many wrong searches find the right answer by chance. So a search is recognised among
matrices only, which the hidden cases have; a wrong form of the answer is recognised everywhere.
"""

from __future__ import annotations

import torch

Grads = list[torch.Tensor]


def survivors(got: torch.Tensor, grads: Grads) -> list[int]:
    """The indices i with got = sum of grads[i]."""
    columns = torch.stack([g.flatten().double() for g in grads], dim=1)
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights.tolist()) if w > 0.5]


# ------------------------------------------------------------------------------------------ ways of searching
