"""Sums over the tokens of each sequence, where a row holds several and cp ranks hold parts of each.

    values         [b, s']      a number a token of this rank
    document_ids   [b, s]       which sequence of its row each token of the *whole* row is of
    result         [b, n]       the sum of each sequence; the same on all ranks of cp

With context parallelism each rank adds what it has, and one all-reduce of b n numbers adds the ranks. The gradient of a
sum is 1 for each of its terms, so in the backward pass nothing travels: every rank computes the same loss from the
sums, and the gradient of its own terms. A loss of sequences is therefore the same on all ranks of cp, and one of them
counts it (`counted_once`).
"""

from __future__ import annotations

import torch

from minimegatron.comm.collectives import reduce_from_region
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import local_tokens


def sequence_sums(values: torch.Tensor, document_ids: torch.Tensor, n: int, mesh: Mesh) -> torch.Tensor:
    """The sum of the values of each sequence.

    Args:
        values: [b, s / cp], of this rank's tokens; what must not be in a sum is 0.
        document_ids: [b, s] of the whole rows, from 0.
        n: number of sequences of a row; tokens of others (padding) are left out.
        mesh: its cp axis shares the tokens.

    Returns:
        [b, n], equal on all ranks of cp; 0 for a sequence that a row does not have.
    """
    ids = local_tokens(document_ids, mesh, 1)
    sums = values.new_zeros(len(values), n + 1).scatter_add(1, ids.clamp(max=n), values)[:, :n]
    return reduce_from_region(sums.contiguous(), mesh.cp)


def counted_once(count: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The count of a loss that all ranks of cp compute alike: as it is on the first of them, 0 on the others."""
    return count if mesh.cp.rank == 0 else torch.zeros_like(count)
