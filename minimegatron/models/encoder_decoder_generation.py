"""A step of generation by an encoder-decoder: sources that are new are encoded, new tokens of targets decoded.

A prompt is a source and `decoder_start_token_id`, which is in no source; so a row of any tokens says where its targets
begin. A prompt is computed in one step, because an encoder sees all of it: the encoder runs once, each decoder layer
keeps the keys and values of the memory in the source's own pages, and a later step knows the length of a source from a
slot.

    new tokens of a step   a a a a S   b   c c S c        S starts a target; a is a prompt, b a token after an older one
    sources                a a a a         c c            by the encoder, side by side: the memory
    targets                        S   b       S c        by the decoder, each with its own source

Megatron-LM: `megatron/core/inference/model_inference_wrappers/t5/t5_inference_wrapper.py`, which computes source and
target anew in each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from minimegatron.layers.attention.relative import BiasedMask, Buckets, CrossMask, MemoryContext
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.inference_context import InferenceContext, LayerState
from minimegatron.models.block import TransformerBlock

LENGTH = "source_length"  # what the first decoder layer of a stage keeps for a sequence, [1]


def new_row(
    blocks: tuple[TransformerBlock, TransformerBlock],
    buckets: tuple[Buckets, Buckets],
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    context: InferenceContext,
    start: int,
) -> torch.Tensor:
    """The row of new tokens after a stage's layers.

    Args:
        blocks: the layers of the encoder and of the decoder that a stage has.
        buckets: the tables of relative positions of both.
        tokens: [1, n] ids, the new ones of all sequences.
        hidden: [n, 1, h], embedded, or what the stage before has made.
        context: which sequence has which of them, and what is kept of it.
        start: `decoder_start_token_id`.

    Returns:
        [n, 1, h].
    """
    (encoder, decoder), (of_encoder, of_decoder) = blocks, buckets
    new = _new_sources(tokens, context, start)
    at, sources = _part(context, [(0, count) for count in new])
    memory = None
    if len(at):
        state = LayerState(sources, -1)
        ids = state.padded(torch.ones_like(at)[:, None]).t()  # [r, n]: 1 a token, 0 padding
        mask = BiasedMask(False, None, ids, buckets=of_encoder)
        memory = state.unpadded(encoder(state.padded(hidden[at]), AttentionContext(None, mask)))
        hidden = hidden.index_copy(0, at, memory)
    if not decoder.layers and decoder.final_layernorm is None:
        return hidden
    at, targets = _part(context, [(count, whole) for count, whole in zip(new, context.new, strict=True)])
    lengths = _source_lengths(decoder, context, new)
    made = decoder(
        hidden[at],
        MemoryContext(
            None,
            BiasedMask(buckets=of_decoder, sources=lengths),
            targets,
            memory,
            CrossMask(sources=lengths),
            sources,
        ),
    )
    return hidden.index_copy(0, at, made)


def _new_sources(tokens: torch.Tensor, context: InferenceContext, start: int) -> list[int]:
    """How many of each sequence's new tokens are of its source: those of a prompt before the first start."""
    row, found, begin = tokens[0].tolist(), [], 0
    for count, kept in zip(context.new, context.kept.tolist(), strict=True):
        mine = row[begin : begin + count]
        found.append(0 if kept else mine.index(start))
        begin += count
    return found


def _source_lengths(decoder: TransformerBlock, context: InferenceContext, new: Sequence[int]) -> torch.Tensor:
    """[r], how long the source of each sequence is; kept from its first step on."""
    lengths = torch.tensor(new, device=context.slots.device)
    if not decoder.layers:
        return lengths
    state = LayerState(context, int(next(iter(decoder.layers))))
    lengths = torch.where(context.kept == 0, lengths, state.read_sequences(LENGTH)[0][:, 0])
    state.write_sequences(**{LENGTH: lengths[:, None]})
    return lengths


def _part(context: InferenceContext, spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, InferenceContext]:
    """Some new tokens of each sequence, [first, stop) among its own: their places in the row, and a context of them.

    Sequences that have none are left out; what is kept of a sequence must then not be asked of the context.
    """
    device, starts, at, new = context.slots.device, context.starts.tolist(), list[int](), list[int]()
    for begin, (first, stop) in zip(starts, spans, strict=False):
        at += range(begin + first, begin + stop)
        new += [stop - first] * (stop > first)
    places = torch.tensor(at, dtype=torch.int64, device=device)
    ends = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return places, dataclasses.replace(
        context,
        position_ids=context.position_ids[:, places],
        rows=context.rows[places],
        starts=ends,
        new=tuple(new),
        _cache={},
    )
