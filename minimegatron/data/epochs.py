"""Sample k of a run without end: epoch after epoch, each in an order of its own.

The problem in a sentence: the arrays of `indices` are a function of how many samples a run wants, so a run that is made
longer, after it has trained on some, would repeat samples and skip others.

So the order of an epoch is drawn from the seed and its number alone, and its arrays are made when its first sample is
read. Let T be the tokens of an epoch, s those of a sample:

    stream     | documents of epoch 0, shuffled | documents of epoch 1, shuffled | ...             T tokens each
    samples    |  0 |  1 | ...              | B(1) |  ...                    | B(2) |              s tokens each
    B(e) = (e T - 1) // s                       samples that end before epoch e does; the others of epoch e are a block

A *block* holds samples B(e) to B(e+1), shuffled. Its first one may begin in the epoch before, or, where documents are
few, in many epochs before; so the block's documents begin with what is left of those.

| block | drawn by                    | arrays                                                                        |
|-------|-----------------------------|-------------------------------------------------------------------------------|
| 0     | `RandomState(seed)`         | Megatron's for one epoch, element by element                                  |
| e > 0 | `RandomState([seed, e])`    | ours: Megatron shuffles all epochs of a run together                          |

With `joint` samples, block 0 is as many epochs as they take, in Megatron's order of exactly so many samples. So goes on
what began with that order: a training of Megatron's, or a run of an older version; and any run that asks for it. What
follows is epoch by epoch, so that it may be made longer, too.

Two blocks are held at a time: a run over thousands of epochs of a few documents needs no more memory than one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minimegatron.data.indices import (
    SampleIndices,
    build_sample_indices,
    count_epochs,
    count_samples,
    locate,
    no_token,
    numbered,
    shuffled,
)

HELD = 2  # blocks: a batch may lie in two of them

Keep = Callable[[int, Callable[[], SampleIndices]], SampleIndices]


class Epochs:
    """The arrays of every block of one split.

    Args:
        lengths: [S] tokens of every sequence of the dataset.
        documents: [P] the sequences of this split.
        sequence_length: s.
        seed: of all shuffles.
        joint: samples whose epochs are shuffled together; None: each epoch by itself.
        keep: is given the first epoch of a block and what builds it; returns it, built or found.
        progress: a bar where that takes long.

    Attributes:
        tokens: T, of one epoch.
        first: epochs of block 0.

    Raises:
        DataError: there is no token.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        documents: np.ndarray,
        sequence_length: int,
        seed: int,
        joint: int | None = None,
        keep: Keep = lambda epoch, build: build(),
        progress: bool = False,
    ) -> None:
        self.lengths, self.documents, self.s, self.seed, self.joint = lengths, documents, sequence_length, seed, joint
        self.tokens = int(lengths[documents].sum(dtype=np.int64))
        self._keep, self._progress = keep, progress
        self._held: dict[int, SampleIndices] = {}
        if self.tokens == 0:
            raise no_token(len(documents))
        self.first = count_epochs(self.tokens, joint, sequence_length)

    def samples(self, epochs: int) -> int:
        """B(epochs): how many samples end in so many epochs."""
        return count_samples(self.tokens, epochs, self.s)

    def epoch_of(self, k: int) -> int:
        """The epoch in which sample k of the order is read; of those that are shuffled together the first."""
        epoch = count_epochs(self.tokens, k + 1, self.s) - 1
        return 0 if epoch < self.first else epoch

    def find(self, k: int) -> tuple[SampleIndices, int]:
        """The block that holds sample k, and the sample's number in the block's stream."""
        epoch = self.epoch_of(k)
        block = self.block(epoch)
        return block, int(block.shuffle_index[k - (self.samples(epoch) if epoch else 0)])

    def block(self, epoch: int) -> SampleIndices:
        """The arrays of a block, by its first epoch."""
        if epoch not in self._held:
            found = self._keep(epoch, self._build_first if epoch == 0 else lambda: self._build(epoch))
            newest = list(self._held.items())[1 - HELD :]
            self._held = dict([*newest, (epoch, found)])
        return self._held[epoch]

    def _build_first(self) -> SampleIndices:
        if self.samples(self.first):
            return build_sample_indices(self.lengths, self.documents, self.joint, self.s, self.seed, self._progress)
        return SampleIndices(self._shuffled(0)[0], np.zeros((1, 2), np.int32), numbered(0))

    def _build(self, epoch: int) -> SampleIndices:
        before, samples = self.samples(epoch), self.samples(epoch + 1) - self.samples(epoch)
        mine, rng = self._shuffled(epoch)
        rest, offset = self._rest(before * self.s, epoch)
        documents = np.concatenate((rest, mine))
        sample_index = locate(self.lengths[documents], samples, self.s, offset)
        shuffle_index = numbered(samples)
        rng.shuffle(shuffle_index)
        return SampleIndices(documents, sample_index, shuffle_index)

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.random.RandomState]:
        """The documents of an epoch, and the generator as that leaves it."""
        rng = np.random.RandomState([self.seed, epoch] if epoch else self.seed)
        return shuffled(self.documents, rng), rng

    def _rest(self, token: int, epoch: int) -> tuple[np.ndarray, int]:
        """The documents from the one that holds `token` of the stream up to `epoch`, and where in it the token is."""
        at = token // self.tokens
        begin, pieces = at * self.tokens, list[np.ndarray]()
        if at < self.first:
            at, begin, pieces = self.first, 0, [self.block(0).document_index]
        documents = np.concatenate([*pieces, *(self._shuffled(one)[0] for one in range(at, epoch))])
        ends = np.cumsum(self.lengths[documents], dtype=np.int64)
        skipped = int(np.searchsorted(ends, token - begin, side="right"))
        return documents[skipped:], token - begin - (int(ends[skipped - 1]) if skipped else 0)
