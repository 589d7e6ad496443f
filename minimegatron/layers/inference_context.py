"""The state of generation: what a layer keeps of earlier tokens, and where it is stored.

The problem in a sentence: requests of any length come and go, so memory must consist of pieces that any request can
use next.

The new tokens of all sequences of a step are concatenated in one row [1, n], without padding:

    tokens     | a a a a a | b | c | d d d |        a's prompt, one token each of b and c, a chunk of d's prompt
    starts       0           5   6   7       10

One layer keeps two vectors for every token, another one latent, a third one matrix for the whole sequence. A layer
declares its state (`inference_state`), and writes and reads it itself, through its `LayerState`; the owner of the
memory (`inference/paged_cache.py`) need not know the layers:

| kept for each | for example                          | declared as                        | stored in                |
|---------------|--------------------------------------|------------------------------------|--------------------------|
| token         | key and value of attention, a latent | `StateSpec((g, d))`                | pages [pages, size, ...] |
| sequence      | a recurrent state                    | `StateSpec((a, d, d), "sequence")` | slots [slots, ...]       |

A page holds the same tokens in every layer, so a table of pages for each sequence serves all layers. Token j of a
sequence is in row j % (page size) of page `page_table[j // (page size)]`. A forward pass has one `InferenceContext`;
its tensors are on the device, its numbers on the host.

**One sequence at a time.** A layer with a state for each sequence cannot compute on the row as it is, because tokens of
one sequence must not meet another's. `LayerState.padded` puts the sequences side by side, [longest, r, ...], and
`unpadded` puts them back; `lengths` says which of the rows are tokens.

Kwon et al. 2023 (arXiv 2309.06180). Megatron-LM: `megatron/core/inference/contexts/dynamic_context.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from minimegatron.errors import ConfigError
from minimegatron.kernels import ops


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A tensor that a layer keeps.

    Attributes:
        shape: its shape for one token, or for one sequence.
        per: `token` or `sequence`.
        dtype: its dtype; default that of the model's weights.
        by_head: of a shape (heads, ...) for a token: each head's part of a page is contiguous in memory, so that a CPU
            reads it in order. Otherwise a page is its tokens, one after the other.
    """

    shape: tuple[int, ...]
    per: Literal["token", "sequence"] = "token"
    dtype: torch.dtype | None = None
    by_head: bool = False


def inference_state_of(module: Any, what: str) -> dict[str, StateSpec]:
    """The state that a module declares. A subclass must declare its own, because it may compute something else.

    Raises:
        ConfigError: its class has no `inference_state` of its own.
    """
    if "inference_state" not in vars(type(module)):
        raise ConfigError(
            f"{what} is a {type(module).__name__}, which does not say what it keeps of earlier tokens",
            fix="generate with decoder_layer_spec's own layers, or give the class an `inference_state` "
            "(layers/inference_context)",
        )
    state: dict[str, StateSpec] = module.inference_state()
    return state


@dataclasses.dataclass(frozen=True, eq=False)
class InferenceContext:
    """A forward pass over the new tokens of r sequences, n in all, in one row.

    Attributes:
        state: layer number -> name -> pages [pages, page size, *shape] of tokens, or slots [slots, *shape].
        position_ids: [1, n], the position of each new token in its sequence.
        rows: [n] int64, the row of each new token in pages seen as [pages * page size, *shape].
        starts: [r + 1] int32, where each sequence's new tokens begin in the row; the last is n.
        lengths: [r] int32, how many tokens each sequence has after the pass, the new ones among them.
        page_table: [r, most] int32, the pages of each sequence in order; entries after its last page are arbitrary.
        slots: [r] int64, the slot of each sequence.
        new: how many new tokens each sequence has, on the host.
        totals: `lengths` on the host; None in a recording, where the host must not branch on them.
    """

    state: Mapping[int, Mapping[str, torch.Tensor]]
    position_ids: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    new: tuple[int, ...]
    totals: tuple[int, ...] | None
    _cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)  # of all layers of a pass

    @property
    def kept(self) -> torch.Tensor:
        """[r], how many tokens each sequence had before the pass."""
        return self.lengths - self.starts.diff()

    def without_first(self, count: int, numbers: Iterable[int]) -> InferenceContext:
        """The same new tokens, for layers `numbers`, which keep nothing of the first `count` tokens of a sequence.

        To these layers pages have one token each: then a table can begin behind any token.
        """
        state = {number: self.state[number] for number in numbers}
        size = next(buffer.shape[1] for layer in state.values() for buffer in layer.values())
        within = torch.arange(size, dtype=torch.int32, device=self.page_table.device)
        return dataclasses.replace(
            self,
            state={n: {name: x.flatten(0, 1).unsqueeze(1) for name, x in layer.items()} for n, layer in state.items()},
            lengths=self.lengths - count,
            page_table=(self.page_table[..., None] * size + within).flatten(1)[:, count:],
            totals=None if self.totals is None else tuple(total - count for total in self.totals),
            _cache={},
        )

    def once(self, key: Any, make: Any) -> Any:
        """The result of `make`, cached for all layers of the pass."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerState:
    """One layer's part of an `InferenceContext`."""

    context: InferenceContext
    layer_number: int

    def write_tokens(self, **new: torch.Tensor) -> None:
        """Store the state of the new tokens, [n, 1, *shape] each."""
        for name, tokens in new.items():
            ops.keep_tokens(tokens.flatten(0, 1), self.pages(name), self.context.rows)

    def pages(self, name: str) -> torch.Tensor:
        """All pages of this layer, [pages, page size, *shape], strided; attention reads a sequence's pages in place."""
        return self.context.state[self.layer_number][name]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """The new tokens x [n, 1, ...] as one column for each sequence, [longest, r, ...], padded with zeros."""
        padded = x.new_zeros((max(self.context.new), len(self.context.new), *x.shape[2:]))
        padded[self._places()] = x[:, 0]
        return padded

    def unpadded(self, padded: torch.Tensor) -> torch.Tensor:
        """`padded`, back in one row: [n, 1, ...]."""
        return padded[self._places()].unsqueeze(1)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(index among its sequence's new tokens, number of its sequence) of each token of the row."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            context = self.context
            n = context.position_ids.shape[1]
            of = torch.arange(n, device=context.starts.device)
            sequence = torch.searchsorted(context.starts[1:], of, right=True).clamp(max=len(context.new) - 1)
            return of - context.starts[sequence], sequence

        return self.context.once("places", make)  # type: ignore[no-any-return]

    def read_sequences(self, *names: str) -> tuple[torch.Tensor, ...]:
        """The state of each sequence before the new tokens, [r, *shape] each; zeros before its first token."""
        begins = self.context.kept == 0
        found = []
        for name in names:
            value = self.context.state[self.layer_number][name][self.context.slots]
            found.append(value.masked_fill(begins.view(-1, *[1] * (value.dim() - 1)), 0.0))
        return tuple(found)

    def write_sequences(self, **new: torch.Tensor) -> None:
        """Store the new state of each sequence, [r, *shape] each."""
        for name, value in new.items():
            self.context.state[self.layer_number][name].index_copy_(0, self.context.slots, value)
