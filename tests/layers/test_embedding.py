"""The table that is cut over ranks, where ids are wrong; everything else about it is in the serial twin."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.embedding import VocabParallelEmbedding
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import Init

ROWS = 8


def look_up(rank: int, world: int, wrong: int) -> bool:
    """Whether an id outside the table is refused here, and the others are not."""
    table = VocabParallelEmbedding(
        ROWS, 3, Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp, init=Init(std=1.0)
    )
    initialize(table, 1)
    everything = table(torch.arange(ROWS)[None])
    assert everything.shape == (ROWS, 1, 3) and (everything != 0).all()
    with pytest.raises(IndexError):
        table(torch.tensor([[0, wrong]]))
    return True


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("wrong", [-1, ROWS, ROWS + 1])
def test_an_id_outside_the_table_is_refused_on_every_rank_and_not_embedded_as_zeros(ranks, world, wrong):
    assert all(ranks(world).run(look_up, wrong))
