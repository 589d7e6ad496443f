"""The table that is cut over ranks: wrong ids, and gradients of its rows; all else about it is in the serial twin."""

from __future__ import annotations

import contextlib

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.layers.dropout import Dropout
from minimegatron.layers.embedding import LanguageModelEmbedding, VocabParallelEmbedding
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import Init
from minimegatron.models.chunks import build_model_chunks
from minimegatron.parallel.data.ddp import data_parallel

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


@pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
def test_rows_that_go_straight_into_the_buffer_are_autograds_gradient(tied):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8, "vocab_size": 16}
    config = TransformerConfig(**sizes, untie_embeddings_and_output_weights=not tied)
    ids = torch.tensor([[3, 3, 0, 15, 3], [0, 1, 3, 1, 2]])
    results = []
    for wrapped in (False, True):
        model = build_model_chunks(config, Mesh.serial(), 0)
        ddp = data_parallel(model, Mesh.serial()) if wrapped else None
        for batch in (ids, ids.flip(1)):  # two microbatches
            with ddp.backward_pass() if ddp else contextlib.nullcontext():
                model(batch[:, :-1], labels=batch[:, 1:]).sum().backward()
        table = model.embedding.word_embeddings.weight
        assert (table.grad is None) == wrapped
        results.append(table.main_grad if wrapped else table.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert results[0][3].abs().sum() > 0


def test_the_scaled_embedding_is_gemmas():
    """Its factor is rounded as its weights are, before the product: 8.485 is 8.5 in bf16."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    fields = {"position_embedding_type": "none", "scale_embeddings": True, "params_dtype": "bf16"}
    config = TransformerConfig(hidden_size=72, num_attention_heads=4, vocab_size=32, **fields)
    ours = LanguageModelEmbedding(config, Mesh.serial(), Dropout(0.0, None))
    theirs = Gemma3TextScaledWordEmbedding(128, 72, 0, 72**0.5).bfloat16()
    with torch.no_grad():
        initialize(ours, 1)
        theirs.weight.copy_(ours.word_embeddings.weight)
        tokens = torch.arange(32)[None]
        assert torch.equal(ours(tokens, tokens).transpose(0, 1), theirs(tokens))
