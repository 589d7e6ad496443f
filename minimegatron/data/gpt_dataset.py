"""Samples of s + 1 tokens out of an indexed dataset, in the order that `indices` lays down.

`GPTDataset` joins the three index arrays of an epoch with the tokens. Reading sample k touches the few documents it
spans and nothing else, so a run resumes at any sample at once; a batch is copied straight into one [b, s+1] array.

The arrays of a large corpus take seconds to build and are the same on every rank, so they are kept in a cache folder,
keyed by what they depend on: the hash of the dataset's `.idx`, the documents of the split, the epoch, s and the seed
(see `indices`). Those of a small one are made faster than they are read, and are not kept.

`MockGPTDataset` (`--mock-data`) needs no file: document i counts 1, 2, 3 ... up to its length and ends. That is
Megatron's mock data, sample by sample, and a model learns it within a few steps, so a falling loss means something.

**Masks** (`make_batch`). A sample is cut out of a stream of documents, so it may hold the end of one and the beginning
of the next. Three of Megatron's flags say how much the model may know of that; let E be the end-of-document id::

    tokens                         a  b  E  c  d  e  E  f
    document_ids                   0  0  0  1  1  1  1  2      the E belongs to the document that it ends
    position_ids                   0  1  2  3  4  5  6  7
      with reset_position_ids      0  1  2  0  1  2  3  0
    loss_mask                      1  1  1  1  1  1  1  1
      with eod_mask_loss           1  1  0  1  1  1  0  1      predicting f from E is guessing

With `reset_attention_mask` a token attends only to its own document: `document_ids` are returned, and
`layers/attention/mask.cu_seqlens` turns them into what variable-length attention kernels take. (Megatron returns the
[1, s, s] mask, s^2 bytes a sample.) Padding never counts: where the *label* is the pad id the mask is 0, and pad ids
become 0, which any embedding has.

In Megatron-LM: `megatron/core/datasets/gpt_dataset.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.indices import Epochs, SampleIndices, cached_arrays, count_epochs, too_few
from minimegatron.data.tokenizer import NO_PAD, Tokenizer
from minimegatron.errors import ConfigError, DataError

Batch = dict[str, torch.Tensor]


def make_batch(
    text: torch.Tensor,
    eod: int,
    pad: int = NO_PAD,
    *,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> Batch:
    """Inputs, labels and masks of a batch.

    Args:
        text: [b, s + 1] int64 ids.
        eod, pad: ids; `pad` differs from `eod` (see `tokenizer`).

    Returns:
        tokens, labels, position_ids: [b, s] int64; loss_mask: [b, s] float32; and with `reset_attention_mask`
        document_ids: [b, s] int64, counted from 0 in each sample.
    """
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    if eod_mask_loss:
        loss_mask[tokens == eod] = 0.0
    if reset_position_ids or reset_attention_mask:
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:, 1:] = tokens[:, :-1] == eod
        if reset_position_ids:
            batch["position_ids"] = position_ids - (position_ids * begins).cummax(dim=1).values
        if reset_attention_mask:
            batch["document_ids"] = begins.cumsum(dim=1)
    if pad != NO_PAD:
        loss_mask[labels == pad] = 0.0
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
    return batch


CACHED_FROM = 1 << 22  # documents and samples of an epoch: a tenth of a second, 50 MB on each rank


@dataclasses.dataclass(frozen=True)
class GPTDatasetConfig:
    """How tokens become samples; Megatron's names.

    Attributes:
        sequence_length: s, tokens of a sample.
        tokenizer: gives `eod`, `pad` (never the same id: see `Tokenizer`) and `vocab_size`.
        random_seed: seed of the shuffles.
        reset_position_ids, reset_attention_mask, eod_mask_loss: see `make_batch`.
        sequence_packing: samples of whole documents instead of a stream that is cut every s tokens (see `packing`).
        path_to_cache: folder of the index arrays; None for `<prefix>.cache` beside the data.
        progress: show a bar on stderr if arrays take long to build.
        objective: what is learned from text; None: the next token.
    """

    sequence_length: int
    tokenizer: Tokenizer
    random_seed: int = 1234
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    path_to_cache: str | None = None
    sequence_packing: bool = False
    progress: bool = False
    objective: Objective | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length is {self.sequence_length}", fix="at least 1")


class LowLevelDataset(Protocol):
    """The source of tokens: `IndexedDataset`, or a rule that makes them."""

    sequence_lengths: np.ndarray

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class SampleDataset(Protocol):
    """Samples by number, read as whole batches.

    Attributes:
        known: sample k is what it is before the run asks for it, so one that goes on can compare it.
    """

    known: bool = True

    def __len__(self) -> int: ...
    def batch(self, samples: Sequence[int]) -> Batch: ...

    def __getitem__(self, k: int) -> Batch:
        """Sample k: the tensors of `batch` without the batch dimension."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.batch([k]).items()}


class Dataset(SampleDataset, Protocol):
    """The samples of a run."""

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        ...

    def begun(self, first: int, end: int) -> dict[str, int]:
        """{name: the last epoch, from 0, that begins in samples [first, end)}, of each part that begins one."""
        ...


class Objective:
    """What a model learns from text where that is not the next token: how its samples are made.

    Attributes:
        vocab_size: ids of the model: those of the tokenizer, and those that samples have besides.
    """

    vocab_size: int

    def text_length(self, s: int) -> int:
        """Tokens of text of which a sample of s positions is made."""
        return s

    def of_documents(
        self, dataset: LowLevelDataset, documents: np.ndarray, num_samples: int | None, config: GPTDatasetConfig
    ) -> Dataset | None:
        """Samples of a file's whole documents (as of `GPTDataset`); None: of its stream, by `of_texts`."""
        return None

    def of_texts(self, texts: Dataset) -> Dataset:
        """Samples of samples of `text_length` tokens, which were cut from the stream."""
        return texts


class ReadInEpochs(SampleDataset, Protocol):
    """A split of one dataset that is read epoch by epoch."""

    dataset: LowLevelDataset

    def epoch_of(self, k: int) -> int: ...

    @property
    def name(self) -> str:
        """The prefix of the files."""
        return str(self.dataset.prefix) if isinstance(self.dataset, IndexedDataset) else "mock data"

    def begun(self, first: int, end: int) -> dict[str, int]:
        """{name: the last epoch, from 0, that begins in samples [first, end)}; {} if no epoch but the first does."""
        last = self.epoch_of(end - 1)
        return {self.name: last} if last > (self.epoch_of(first - 1) if first else 0) else {}


class GPTDataset(ReadInEpochs):
    """The samples of one split of one dataset.

    Args:
        dataset: the tokens.
        documents: [P] sequences of this split.
        num_samples: at least this many, over as many epochs as needed; None for one epoch.
        config: see `GPTDatasetConfig`.
        joint: number of samples in Megatron's order, which shuffles their epochs together (see `indices`).

    Attributes:
        epochs: the index arrays, epoch by epoch.
        num_epochs: how often each document is read.

    Raises:
        DataError: the split has no token, or is read once and has too few for a sample; the cache cannot be written.
    """

    def __init__(
        self,
        dataset: LowLevelDataset,
        documents: np.ndarray,
        num_samples: int | None,
        config: GPTDatasetConfig,
        joint: int | None = None,
    ) -> None:
        self.dataset, self.config, self.documents = dataset, config, documents
        self.epochs = Epochs(
            dataset.sequence_lengths,
            documents,
            config.sequence_length,
            config.random_seed,
            joint,
            self._kept,
            config.progress,
        )
        wanted = count_epochs(self.epochs.tokens, num_samples, config.sequence_length)
        self.num_epochs = max(wanted, 1 if joint is None else self.epochs.first)
        if len(self) == 0:
            raise too_few(self.epochs.tokens, config.sequence_length)
        self.epochs.block(0)  # a large one is built now, while the other ranks wait

    def __len__(self) -> int:
        """The number of samples, including the last epoch's surplus over `num_samples`."""
        return self.epochs.samples(self.num_epochs)

    def _kept(self, epoch: int, build: Callable[[], SampleIndices]) -> SampleIndices:
        """The arrays of a block, through the cache if they are large."""
        dataset, config, epochs = self.dataset, self.config, self.epochs
        size = (len(self.documents) + epochs.tokens // config.sequence_length) * (1 if epoch else epochs.first)
        if not isinstance(dataset, IndexedDataset) or size < CACHED_FROM:
            return build()
        described = {"arrays": "GPTDataset", "num_samples": epochs.joint, "random_seed": config.random_seed}
        described |= {"epoch": epoch} if epoch else {}
        return SampleIndices(**kept_arrays(dataset, self.documents, config, described, lambda: build()._asdict()))

    def epoch_of(self, k: int) -> int:
        """The epoch of sample k; for epochs that are shuffled together the first."""
        return self.epochs.epoch_of(k)

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        return {self.name: samples * self.config.sequence_length / self.epochs.tokens}

    def spans(self, k: int) -> Iterator[tuple[int, int, int]]:
        """The pieces of sample k: (sequence, offset, length), s + 1 tokens together."""
        indices, i = self.epochs.find(k)
        (first, offset), (last, end) = indices.sample_index[i : i + 2].tolist()
        for position in range(first, last + 1):
            sequence = int(indices.document_index[position])
            stop = end + 1 if position == last else int(self.dataset.sequence_lengths[sequence])
            yield sequence, offset, stop - offset
            offset = 0

    def fill(self, k: int, row: np.ndarray) -> None:
        """Copy the s + 1 tokens of sample k into `row`.

        Raises:
            DataError: an id outside the vocabulary, with its place.
        """
        at = 0
        for sequence, offset, length in self.spans(k):
            row[at : at + length] = self.dataset.get(sequence, offset, length)
            at += length
        assert at == len(row), f"sample {k} has {at} tokens, not {len(row)}"
        if row.max() >= self.config.tokenizer.vocab_size or row.min() < 0:
            self._refuse(k)

    def _refuse(self, k: int) -> None:
        vocab_size = self.config.tokenizer.vocab_size
        if isinstance(self.dataset, IndexedDataset):
            for sequence, offset, length in self.spans(k):
                start = int(self.dataset.sequence_pointers[sequence]) // self.dataset.dtype.itemsize + offset
                self.dataset.check_ids(vocab_size, start, start + length)
        raise DataError(
            f"an id of sample {k} is outside the vocabulary [0, {vocab_size})",
            fix="use the tokenizer that the data was made with",
        )

    def batch(self, samples: Sequence[int]) -> Batch:
        """The samples as one batch: see `make_batch` for names and shapes."""
        return read_batch(self, samples)


def kept_arrays(
    dataset: IndexedDataset,
    documents: np.ndarray,
    config: GPTDatasetConfig,
    description: Mapping[str, Any],
    build: Callable[[], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """`cached_arrays` of one split, beside the data or in the configured folder; `description` identifies them."""
    of_split = {
        "idx_sha256": dataset.idx_sha256,
        "documents_sha256": hashlib.sha256(documents.tobytes()).hexdigest(),
        "sequence_length": config.sequence_length,
    }
    return cached_arrays(config.path_to_cache or dataset.prefix + ".cache", {**of_split, **description}, build)


class FillsRows(Protocol):
    """A dataset that can copy sample k into a row."""

    config: GPTDatasetConfig

    def fill(self, k: int, row: np.ndarray) -> None: ...


def read_batch(dataset: FillsRows, samples: Sequence[int]) -> Batch:
    """Copy samples into one [b, s+1] array, then cut it into inputs and labels."""
    config = dataset.config
    text = np.empty((len(samples), config.sequence_length + 1), dtype=np.int64)
    for row, k in zip(text, samples, strict=True):
        dataset.fill(k, row)
    return make_batch(
        torch.from_numpy(text),
        config.tokenizer.eod,
        config.tokenizer.pad,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
    )


# ------------------------------------------------------------------------------------------ mock data


class MockGPTLowLevelDataset:
    """100,000 documents of 1 to 4,095 tokens: 1, 2, 3 ... (modulo the vocabulary), then the end of document."""

    num_documents, max_length = 100_000, 4096

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod
        rng = np.random.default_rng(seed=0)
        self.sequence_lengths = rng.integers(low=1, high=self.max_length, size=self.num_documents, dtype=np.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        size = int(self.sequence_lengths[idx])
        stop = size if length is None else offset + length
        ids = np.arange(offset + 1, stop + 1) % self.vocab_size
        if stop == size:
            ids[-1] = self.eod
        return ids


class MockGPTDataset(GPTDataset):
    """Megatron's mock samples: deterministic, and learnable (the next id is this one plus one)."""

    def __init__(
        self, documents: np.ndarray, num_samples: int | None, config: GPTDatasetConfig, joint: int | None = None
    ) -> None:
        super().__init__(MockGPTLowLevelDataset(config.tokenizer), documents, num_samples, config, joint)
