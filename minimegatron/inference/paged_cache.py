"""The KV cache of one rank: pages for what layers keep of each token, slots for what they keep of each sequence.

The problem in a sentence: to make token s + 1 a decoder compares one query with s keys, and without a cache it would
compute all s keys again, for every token.

    pages  [pages, page size, ...]   a buffer for each tensor that a layer keeps of a token
    slots  [slots, ...]              a buffer for each tensor that a layer keeps of a sequence

Layers say what they keep, write it and read it (`layers/inference_context.py`): keys and values of a rank's heads,
[g/t, d] each; with latent attention (MLA) the latent and the rotated key, [r + d_r]; a recurrent state. The block
manager assigns pages (`inference/block_manager.py`); a page number means the same page in all layers, on all ranks.

| elements of a token in a layer | bytes in bf16, Llama-3 8B (g = 8, d = 128)  |
|--------------------------------|---------------------------------------------|
| 2 g/t d                        | 4,096 on one rank, in 32 layers 131,072     |

No communication: a tp rank keeps its own heads, a pp rank its own layers.

Megatron-LM: `megatron/core/inference/contexts/dynamic_context.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from minimegatron.kernels import huge_pages
from minimegatron.layers.inference_context import InferenceContext, StateSpec


def bytes_per(state: Mapping[int, Mapping[str, StateSpec]], per: str, dtype: torch.dtype) -> int:
    """Bytes that the layers of this rank keep for one "token", or for one "sequence"."""
    return sum(
        torch.Size(spec.shape).numel() * (spec.dtype or dtype).itemsize
        for layer in state.values()
        for spec in layer.values()
        if spec.per == per
    )


class PagedCache:
    """The pages and slots of a rank's layers.

    Args:
        state: layer number -> name -> shape of what the layer keeps, see `LanguageModel.inference_state`.
        num_pages: including page 0, which is for padding.
        page_size: tokens of a page.
        num_slots: including slot 0, which is for padding.
        dtype: of buffers whose spec has none.
        device: of the layers.

    Attributes:
        layers: layer number -> name -> buffer.
    """

    def __init__(
        self,
        state: Mapping[int, Mapping[str, StateSpec]],
        num_pages: int,
        page_size: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size, self.device = page_size, device

        def zeros(spec: StateSpec) -> torch.Tensor:
            rows = (num_pages, page_size) if spec.per == "token" else (num_slots,)
            shape = (*rows, *spec.shape)
            if spec.by_head:
                shape = (num_pages, spec.shape[0], page_size, *spec.shape[1:])
            buffer = huge_pages.empty(shape, spec.dtype or dtype, device).zero_()
            return buffer.transpose(1, 2) if spec.by_head else buffer

        self._specs = [spec for layer in state.values() for spec in layer.values()]
        self.layers: Mapping[int, Mapping[str, torch.Tensor]] = {
            number: {name: zeros(spec) for name, spec in layer.items()} for number, layer in state.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def copy(self, pages: Sequence[tuple[int, int]], slots: Sequence[tuple[int, int]]) -> None:
        """Copy pages and slots, (from, to) pairs. All are read before any is written; each `to` occurs once."""
        for pairs, per in ((pages, "token"), (slots, "sequence")):
            if pairs:
                source, to = torch.tensor(pairs, device=self.device).t()
                for spec, buffer in zip(self._specs, self._buffers(), strict=True):
                    if spec.per == per:
                        buffer[to] = buffer[source]

    def context(
        self,
        new: Sequence[int],
        kept: Sequence[int],
        tables: Sequence[Sequence[int]],
        slots: Sequence[int],
    ) -> InferenceContext:
        """The context of a forward pass over the new tokens of some sequences, in one row.

        Args:
            new: number of new tokens of each sequence.
            kept: number of its tokens in the cache.
            tables: its pages, enough for both.
            slots: its slot; 0 without slots.
        """
        size = self.page_size
        places, rows, starts = [], [], [0]
        for count, before, table in zip(new, kept, tables, strict=True):
            if count == 1:
                places.append(before)
                rows.append(table[before // size] * size + before % size)
            else:
                places += range(before, before + count)
                rows += [table[j // size] * size + j % size for j in range(before, before + count)]
            starts.append(starts[-1] + count)
        most = max(map(len, tables))
        totals = tuple(before + count for before, count in zip(kept, new, strict=True))
        position_ids, kept_in, in_slots = self._tensors(torch.int64, places, rows, slots)
        padded = [page for table in tables for page in (*table, *[0] * (most - len(table)))]
        begins, lengths, page_table = self._tensors(torch.int32, starts, totals, padded)
        return InferenceContext(
            state=self.layers,
            position_ids=position_ids[None],
            rows=kept_in,
            starts=begins,
            lengths=lengths,
            page_table=page_table.view(len(new), most),
            slots=in_slots,
            new=tuple(new),
            totals=totals,
        )

    def _tensors(self, dtype: torch.dtype, *values: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Each list as a tensor; one copy to the device for all."""
        whole = torch.tensor(list(itertools.chain(*values)), dtype=dtype, device=self.device)
        return whole.split([len(each) for each in values])

    def _buffers(self) -> Iterable[torch.Tensor]:
        return (buffer for layer in self.layers.values() for buffer in layer.values())
