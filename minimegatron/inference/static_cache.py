"""The KV cache of generation: keys and values of all tokens so far, in memory of a fixed size.

The problem in a sentence: to make token s + 1 a decoder compares one query with s keys, and without a cache it would
make all s keys again, for every token.

    buffer  [m, b, g/t, d]   of keys and of values, for each layer; m is the longest that prompt and answer may become
    place   [b]              where each sequence's next token stands: a tensor on the device

    prefill   the n tokens of a prompt are written to rows 0 .. n - 1, and attend to each other as in training
    decode    one token is written to row place_i of sequence i, and sees the rows  j <= place_i  of m

With latent attention a row is the latent and the turned key, [r] and [d_r], in place of keys and values of all heads.

**Prompts of different lengths** stand left: sequence i has its own tokens at rows 0 .. n_i - 1 and padding behind them.
No token of its own comes after padding, so none sees any. Then `place_i` = n_i: what is generated is written over the
padding, and what is not yet overwritten lies behind `place_i`, which no query sees. So every sequence is computed as if
it were alone, at its own positions, and no mask for padding exists.

**No decision of the host.** Where to write and what to see follow from `place` on the device, and all shapes are those
of the buffer. So one recording of a step (`inference/decode.py`) serves every position. The price is that a query reads
all m rows; a step that is not recorded may say how many are in use (`key_length`).

| numbers for a token and layer | bytes in bf16, Llama-3 8B (g = 8, d = 128) |
|-------------------------------|---------------------------------------------|
| 2 g/t d                       | 4,096 on one rank, in 32 layers 131,072     |

Nothing travels: a rank of tp caches its own heads. Pope et al. 2022 (arXiv 2211.05102). Megatron-LM:
`megatron/core/inference/contexts/static_context.py`.
"""

from __future__ import annotations

import dataclasses

import torch

from minimegatron.errors import ConfigError, DataError
from minimegatron.models.decoder import GPTModel

ROWS_DIVISIBLE_BY = 8  # masks of the fused attention kernels begin at multiples of 16 bytes


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A forward pass over the first n tokens of every sequence.

    Attributes:
        position_ids: [b, n].
        bias: None: the tokens attend to each other, and there are no others.
    """

    cache: StaticCache
    position_ids: torch.Tensor
    bias: torch.Tensor | None = None

    def update(self, layer_number: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `layers.attention.KVCache`."""
        for buffer, rows in zip(self.cache.layers[layer_number], new, strict=True):
            buffer[: len(rows)].copy_(rows)
        return new


@dataclasses.dataclass(frozen=True)
class Decode:
    """A forward pass over the n tokens that follow those in the cache.

    Attributes:
        position_ids: [b, n].
        bias: [b, 1, n, key_length], which of the first `key_length` rows each token sees: 0 or minus infinity.
        rows: [n b], which rows of a buffer [m b, ...] are written.
    """

    cache: StaticCache
    position_ids: torch.Tensor
    bias: torch.Tensor
    rows: torch.Tensor

    def update(self, layer_number: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `layers.attention.KVCache`."""
        buffers, key_length = self.cache.layers[layer_number], self.bias.shape[-1]
        for buffer, rows in zip(buffers, new, strict=True):
            buffer.flatten(0, 1).index_copy_(0, self.rows, rows.flatten(0, 1))
        return tuple(buffer[:key_length] for buffer in buffers)


class StaticCache:
    """Room for b sequences of a fixed length.

    Args:
        model: whose attention layers have `cache_shapes`.
        batch_size: b.
        max_sequence_length: of prompt and answer together, in tokens; the buffers have at least as many rows.

    Attributes:
        layers: layer number -> its buffers, [m, b, ...] each.
        positions: [b] int64, on the device: the place of each sequence's next token.

    Raises:
        ConfigError: no sequence, or no token.
    """

    def __init__(self, model: GPTModel, batch_size: int, max_sequence_length: int) -> None:
        if batch_size < 1 or max_sequence_length < 1:
            raise ConfigError(
                f"a cache for {batch_size} sequences of {max_sequence_length} tokens", fix="at least 1 of each"
            )
        self.max_sequence_length, self.window = max_sequence_length, model.config.sliding_window
        m, b = -(-max_sequence_length // ROWS_DIVISIBLE_BY) * ROWS_DIVISIBLE_BY, batch_size
        weight = next(model.parameters())
        self.layers: dict[int, tuple[torch.Tensor, ...]] = {
            int(number): tuple(weight.new_zeros((m, b, *shape)) for shape in layer.self_attention.cache_shapes)  # type: ignore[union-attr]
            for number, layer in model.decoder.layers.items()
        }
        self.dtype = weight.dtype
        self.positions = torch.zeros(b, dtype=torch.int64, device=weight.device)
        self._keys = torch.arange(m, device=weight.device)
        self._columns = torch.arange(b, device=weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(buffer.nbytes for buffers in self.layers.values() for buffer in buffers)

    def prefill(self, n: int) -> Prefill:
        """Empty the cache; what a pass needs over n tokens of every sequence, padding included.

        Raises:
            DataError: they do not fit.
        """
        if n > self.max_sequence_length:
            raise DataError(
                f"a prompt of {n} tokens, and the cache has room for {self.max_sequence_length}",
                fix=f"shorten it, or max_sequence_length={n} and what is to be generated",
            )
        for buffers in self.layers.values():
            for buffer in buffers:
                buffer.zero_()  # a row that no query sees weighs 0, but 0 times what an overflow has left is no 0
        self.positions.zero_()
        return Prefill(self, self._keys[:n].expand(len(self._columns), n))

    def decode(self, n: int = 1, key_length: int | None = None) -> Decode:
        """What a pass needs over the next n tokens of every sequence.

        The caller makes sure that `positions` + n <= max_sequence_length: to check it would make the host wait.

        Args:
            n: tokens.
            key_length: how many rows may be in use after the pass; default all.
        """
        places = self.positions[:, None] + self._keys[:n]  # [b, n]
        keys = self._keys if key_length is None else self._keys[:key_length]
        hidden = keys > places[..., None]
        if self.window is not None:
            hidden = hidden | (keys <= places[..., None] - self.window)
        bias = torch.zeros_like(hidden, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        rows = places.t() * len(self._columns) + self._columns  # [n, b]
        return Decode(self, places, bias[:, None], rows.flatten())

    def advance(self, tokens: torch.Tensor | int) -> None:
        """The pass is over: how many tokens it has added to each sequence, [b] or one number for all."""
        self.positions += tokens
