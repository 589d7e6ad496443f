"""What a fused operation is given and gives where tensors do not say it: a mask, and operations in several halves.

Most operations are a function of tensors. Two are objects, because something happens between their halves:

| operation       | between its halves                         | implemented in           |
|-----------------|--------------------------------------------|--------------------------|
| `cross_entropy` | ranks sum over the parts of the vocabulary | `plain`, `cross_entropy` |
| `permutation`   | experts compute with the rows              | `plain`, `permute`       |

What an operation reads of a mask or of pages stands where it is read (`blockwise.Visibility`, `paged.Paged`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from minimegatron.kernels import blockwise


class Mask(blockwise.Visibility, Protocol):
    """Which query sees which key: `layers/attention/mask.AttentionMask`."""

    @property
    def causal(self) -> bool: ...

    def dense(self, s: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The whole table; None where causal or full attention says the same."""
        ...


class CrossEntropyPart(Protocol):
    """One rank's part of a cross entropy over a cut vocabulary; between two methods ranks combine their results.

    Attributes:
        target: the targets, in the shape of the methods' results.
    """

    target: torch.Tensor

    def top(self) -> torch.Tensor:
        """The largest logit of every row."""
        ...

    def sums(self, top: torch.Tensor, spread: bool) -> list[torch.Tensor]:
        """The terms that are summed over ranks, given the largest logit of all ranks.

        Returns:
            The target's logit, 0 if another rank has it; the sum of exp(z - top); with `spread` the sum of z. The
            first and the last are relative to a z that all ranks share, 0 or top.
        """
        ...

    def lse(self, top: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
        """log of the sum of exp(z), relative to the same z; `partition` is the second sum over all ranks."""
        ...

    def kept(self, partition: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the backward pass needs."""
        ...

    @staticmethod
    def gradient(
        kept: tuple[torch.Tensor, ...],
        dloss: torch.Tensor,
        first: int,
        real: int,
        hit: float,
        spread: float,
        over: bool = False,
    ) -> torch.Tensor:
        """(softmax_j - spread - hit [j is the target]) dloss, 0 in padding: [..., w].

        May be written over what is `kept`; over the logits only if `over`.
        """
        ...


class Permutation(Protocol):
    """Permutes tokens into rows of experts, and back."""

    def permute(self, pairs: torch.Tensor) -> torch.Tensor:
        """[n, h], the rows; `pairs` [n]: t E' + e of every row."""
        ...

    def unpermute(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, h], in the order of `permute` -> [T, h]: each row added to its token."""
        ...
