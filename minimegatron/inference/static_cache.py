"""The static cache of generation: what layers keep of all tokens so far, in memory of a fixed size.

The problem in a sentence: to make token s + 1 a decoder compares one query with s keys, and without a cache it would
make all s keys again, for every token.

    buffer  [m, b, ...]   of what a layer keeps of a token; m is the longest that prompt and answer may become
    buffer  [b, ...]      of what a layer keeps of a sequence
    place   [b]           where each sequence's next token stands: a tensor on the device

    prefill   the n tokens of a prompt are written to rows 0 .. n - 1, and attend to each other as in training
    decode    one token is written to row place_i of sequence i, and sees the rows  j <= place_i  of m

Layers say what they keep, and write and read it (`layers/inference_context.py`): keys and values of a rank's heads,
[g/t, d] each; with latent attention the latent and the turned key, [r] and [d_r]; a recurrent state.

**Prompts of different lengths** stand left: sequence i has its own tokens at rows 0 .. n_i - 1 and padding behind them.
No token of its own comes after padding, so none sees any. Then `place_i` = n_i: what is generated is written over the
padding, and what is not yet overwritten lies behind `place_i`, which no query sees. So every sequence is computed as if
it were alone, at its own positions, and no mask for padding exists.

**No decision of the host.** Where to write and what to see follow from `place` on the device, and all shapes are those
of the buffer. So one recording of a step serves every position. The price is that a query reads
all m rows; a step that is not recorded may say how many are in use (`key_length`).

| numbers for a token and layer | bytes in bf16, Llama-3 8B (g = 8, d = 128) |
|-------------------------------|---------------------------------------------|
| 2 g/t d                       | 4,096 on one rank, in 32 layers 131,072     |

Nothing travels: a rank of tp caches its own heads. Pope et al. 2022 (arXiv 2211.05102). Megatron-LM:
`megatron/core/inference/contexts/static_context.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimegatron.errors import ConfigError, DataError
from minimegatron.layers.inference_context import InferenceContext, StateSpec
from minimegatron.models.contract import LanguageModel

ROWS_DIVISIBLE_BY = 8  # masks of the fused attention kernels begin at multiples of 16 bytes


class StaticCache:
    """Room for b sequences of a fixed length.

    Args:
        model: whose layers say what they keep.
        batch_size: b.
        max_sequence_length: of prompt and answer together, in tokens; the buffers have at least as many rows.

    Attributes:
        layers: layer number -> name -> buffer, [m, b, ...] of tokens and [b, ...] of sequences.
        positions: [b] int64, on the device: the place of each sequence's next token.

    Raises:
        ConfigError: no sequence, or no token, or a layer that does not say what it keeps.
    """

    def __init__(self, model: LanguageModel, batch_size: int, max_sequence_length: int) -> None:
        if batch_size < 1 or max_sequence_length < 1:
            raise ConfigError(
                f"a cache for {batch_size} sequences of {max_sequence_length} tokens", fix="at least 1 of each"
            )
        self.max_sequence_length = max_sequence_length
        m, b = -(-max_sequence_length // ROWS_DIVISIBLE_BY) * ROWS_DIVISIBLE_BY, batch_size
        weight = next(model.parameters())

        def zeros(spec: StateSpec) -> torch.Tensor:
            rows = (m, b) if spec.per == "token" else (b,)
            return weight.new_zeros((*rows, *spec.shape), dtype=spec.dtype)

        self.layers: Mapping[int, Mapping[str, torch.Tensor]] = {
            number: {name: zeros(spec) for name, spec in state.items()}
            for number, state in model.inference_state().items()
        }
        self.positions = torch.zeros(b, dtype=torch.int64, device=weight.device)
        self._keys = torch.arange(m, device=weight.device)
        self._columns = torch.arange(b, device=weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(buffer.nbytes for buffers in self.layers.values() for buffer in buffers.values())

    def prefill(self, n: int, lengths: torch.Tensor | None = None) -> InferenceContext:
        """Empty the cache; what a pass needs over n tokens of every sequence, padding included.

        Args:
            n: tokens.
            lengths: [b], how many of them are a sequence's own; default all.

        Raises:
            DataError: they do not fit.
        """
        if n > self.max_sequence_length:
            raise DataError(
                f"a prompt of {n} tokens, and the cache has room for {self.max_sequence_length}",
                fix=f"shorten it, or max_sequence_length={n} and what is to be generated",
            )
        for buffers in self.layers.values():
            for buffer in buffers.values():
                buffer.zero_()  # a row that no query sees weighs 0, but 0 times what an overflow has left is no 0
        self.positions.zero_()
        return self._pass(n, self._keys[:n], lengths, first=True)

    def decode(self, n: int = 1, key_length: int | None = None) -> InferenceContext:
        """What a pass needs over the next n tokens of every sequence.

        The caller makes sure that `positions` + n <= max_sequence_length: to check it would make the host wait.

        Args:
            n: tokens.
            key_length: how many rows may be in use after the pass; default all.
        """
        return self._pass(n, self._keys if key_length is None else self._keys[:key_length])

    def _pass(
        self, n: int, keys: torch.Tensor, lengths: torch.Tensor | None = None, first: bool = False
    ) -> InferenceContext:
        places = self.positions[:, None] + self._keys[:n]  # [b, n]
        slots = places.t() * len(self._columns) + self._columns  # [n, b]
        return InferenceContext(self.layers, places, lengths, slots.flatten(), keys, first)

    def advance(self, tokens: torch.Tensor | int) -> None:
        """The pass is over: how many tokens it has added to each sequence, [b] or one number for all."""
        self.positions += tokens
