"""Samples for BERT: two pieces of text, some of whose words are hidden.

    [CLS]  the piece A  [SEP]  the piece B  [SEP]  padding          s tokens
      0          0        0         1         1        0            segment of each token (tokentype_ids)
    class of    15 % of all words are hidden, and                   labels
    the pair    the model says which they were

**Pieces** are those of documents, cut every s - 3 tokens: no sample holds two documents by accident. A "sentence" is
any span of text, as in the paper. A piece is cut into A and B where a word begins; in half of the samples B is text of
the same length out of the middle of another document, and class 1 says so. Without a binary head a sample is one piece,
[CLS] A [SEP]. What is left of s is padding, which no token sees (`attention/mask.padded`); so rows count unequal
numbers of words.

**Hidden words** are whole (`data/whole_words`). Of their tokens 80 % become [MASK], 10 % any other token, 10 % stay: a
model that saw [MASK] alone would learn nothing of real words.

**Two losses.** Those of words are averaged over hidden words, as everywhere; the loss of a pair weighs as much as the
hidden words of its sample, so over a batch the pairs weigh as much as the words (`pair_mask`). Where all samples hide
equally many this is the paper's sum of two means.

**Order.** Each epoch is another permutation of all pieces, and each visit hides other words: sample k is drawn from
(seed, k) alone, so a run goes on at any sample, in any layout, and nothing has to be stored.

Devlin et al. 2019 (arXiv 1810.04805), section 3.1 and appendix A.2. Megatron-LM:
`megatron/core/datasets/bert_dataset.py`; there documents were cut into sentences when they were preprocessed, and in
half of the samples the two pieces change places instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minimegatron.data.gpt_dataset import Batch, GPTDatasetConfig, LowLevelDataset, ReadInEpochs
from minimegatron.errors import DataError


class BertDataset(ReadInEpochs):
    """The samples of one split of one dataset.

    Args:
        dataset: the tokens, a sequence a document.
        documents: [P] sequences of this split.
        num_samples: at least this many, over as many epochs as needed; None for one epoch.
        config: sequence length and seed.
        masking: how words are hidden, a `whole_words.MaskedWords`.

    Attributes:
        starts: [P + 1], the number of the first piece of each document; pieces of two tokens or so are left out.
        num_epochs: how often each piece is read.

    Raises:
        DataError: no document is long enough, or there is only one, and pairs are wanted.
    """

    def __init__(
        self,
        dataset: LowLevelDataset,
        documents: np.ndarray,
        num_samples: int | None,
        config: GPTDatasetConfig,
        masking: Any,
    ) -> None:
        self.dataset, self.documents, self.config, self.masking = dataset, documents, config, masking
        room, least = config.sequence_length - self.masking.added, 2 if self.masking.pairs else 1
        if room < least:
            raise DataError(
                f"samples of {config.sequence_length} tokens have no room for text beside {self.masking.added} that "
                "mark it",
                fix=f"--seq-length of at least {self.masking.added + least}",
            )
        least += 2  # [CLS] and [SEP] of a tokenizer that puts them around every text are taken off
        lengths = dataset.sequence_lengths[documents].astype(np.int64) - 1  # without the end of a document
        counts = np.maximum(lengths // room + (lengths % room >= least), 0)
        self.starts, self._room = np.concatenate(([0], np.cumsum(counts))), room
        long = int((counts > 0).sum())
        if long < 1 + self.masking.pairs:
            raise DataError(
                f"{len(documents)} documents, {long} of them of {least} tokens or more: a pair is made of two",
                fix="give this split a larger share of --split; or bert_head lm, whose samples are no pairs",
            )
        self._pieces = int(self.starts[-1])
        self.num_epochs = 1 if num_samples is None else max(1, -(-num_samples // self._pieces))
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.num_epochs * self._pieces

    def epoch_of(self, k: int) -> int:
        """The epoch of sample k."""
        return k // self._pieces

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        return {self.name: samples / self._pieces}

    def _text(self, piece: int) -> np.ndarray:
        """The tokens of a piece, without special ones.

        Raises:
            DataError: an id outside the vocabulary, or too few are left.
        """
        document = self._document(piece)
        sequence, offset = int(self.documents[document]), (piece - int(self.starts[document])) * self._room
        length = min(int(self.dataset.sequence_lengths[sequence]) - 1 - offset, self._room)
        text = self.dataset.get(sequence, offset, length).astype(np.int64)
        size, where = self.config.tokenizer.vocab_size, f"document {sequence}, tokens from {offset} on"
        if text.max() >= size or text.min() < 0:
            bad = int(text[(text >= size) | (text < 0)][0])
            fix = "use the tokenizer that the data was made with"
            raise DataError(f"token {bad} is outside the vocabulary [0, {size})", where=where, fix=fix)
        text = text[~np.isin(text, (self.masking.cls, self.masking.sep))]
        if len(text) < 1 + self.masking.pairs:
            raise DataError(
                f"{length} tokens, nearly all of them [CLS] or [SEP]", where=where, fix="prepare plain text"
            )
        return text

    def _document(self, piece: int) -> int:
        """The place in `documents` of a piece."""
        return int(np.searchsorted(self.starts, piece, "right")) - 1

    def texts(self, k: int) -> tuple[list[np.ndarray], bool]:
        """The texts of sample k, two of a pair, and whether the second belongs to another document."""
        epoch, rng = self.epoch_of(k), np.random.default_rng((self.config.random_seed, 0, k))
        if epoch != self._epoch:
            order = np.random.default_rng((self.config.random_seed, 1, epoch)).permutation(self._pieces)
            self._epoch, self._order = epoch, order
        piece = int(self._order[k % self._pieces])
        text = self._text(piece)
        if not self.masking.pairs:
            return [text], False
        cut = self._cut(text, rng)
        first, second = text[:cut], text[cut:]
        if rng.random() < 0.5:
            return [first, second], False
        begin, end = self.starts[self._document(piece) :][:2].tolist()
        number = int(rng.integers(self._pieces - (end - begin)))  # among the pieces of other documents
        other = self._text(number if number < begin else number + end - begin)
        return [first, other[self._cut(other, rng) :][: len(second)]], True

    def _cut(self, text: np.ndarray, rng: np.random.Generator) -> int:
        """A place inside the text at which a word begins; any, if it is one word."""
        places = self.masking.beginnings(text)[1:]
        return int(rng.choice(places)) if len(places) else int(rng.integers(1, len(text)))

    def batch(self, samples: Sequence[int]) -> Batch:
        """The samples as one batch.

        Returns:
            tokens, labels, position_ids, tokentype_ids, document_ids: [b, s] int64; loss_mask: [b, s] float32, 1 where
            a word is hidden; and for pairs pair_mask: [b, s] float32, the weight of the pair's loss at place 0.

        Raises:
            DataError: an id outside the vocabulary.
        """
        b, s, masking = len(samples), self.config.sequence_length, self.masking
        ids = {name: np.zeros((b, s), np.int64) for name in ("tokens", "labels", "tokentype_ids", "document_ids")}
        counts = {name: np.zeros((b, s), np.float32) for name in ("loss_mask", "pair_mask")[: 1 + masking.pairs]}
        ids["tokens"][:] = masking.pad
        for row, k in enumerate(samples):
            texts, other = self.texts(k)
            rng, whole = np.random.default_rng((self.config.random_seed, 2, k)), np.concatenate(texts)
            hidden, seen = masking.hidden(texts, rng), whole.copy()
            chance = rng.random(len(hidden))
            seen[hidden[chance < 0.8]] = masking.mask
            changed = hidden[chance >= 0.9]
            seen[changed] = rng.choice(masking.words, len(changed))
            ends = np.cumsum([len(text) for text in texts])
            segment = np.searchsorted(ends, np.arange(len(whole)), "right")
            places = np.arange(len(whole)) + 1 + segment  # in the row, where marks are between the texts
            length = int(ends[-1]) + 1 + len(texts)
            tokens, labels, loss_mask = ids["tokens"][row], ids["labels"][row], counts["loss_mask"][row]
            tokens[0], tokens[places], tokens[ends + np.arange(len(texts)) + 1] = masking.cls, seen, masking.sep
            labels[places[hidden]], loss_mask[places[hidden]] = whole[hidden], 1.0
            ids["tokentype_ids"][row, int(ends[0]) + 2 : length] = 1
            ids["document_ids"][row, length:] = 1
            if masking.pairs:
                labels[0], counts["pair_mask"][row, 0] = int(other), len(hidden)
        positions = torch.arange(s).repeat(b, 1)
        return {name: torch.from_numpy(array) for name, array in (ids | counts).items()} | {"position_ids": positions}
