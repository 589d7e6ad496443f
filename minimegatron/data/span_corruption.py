"""Span corruption: the pre-training of an encoder-decoder (T5), from the tokens that a decoder's pre-training reads.

    raw text    a  b  c  d  e  f  g  h  i  j  k  l                noise: {c d} and {j}
    source      a  b <0> e  f  g  h  i <1> k  l  E                a sentinel in place of each span; E ends a document
    target      <0> c  d <1> j  E                                 each sentinel and its span
    the decoder reads  D <0> c  d <1> j                           the same behind `decoder_start_token_id`

15 % of the tokens are noise, in spans of 3 on average. Given the length L of the text, the numbers of noise tokens and
of spans are fixed; where the spans begin is drawn. So all sources have one length, and all targets
(`config/encoder_decoder`): L is chosen so that a source fills its part of a row, and no source is padded. A target may
be shorter than its part: what follows it is no label.

Sample k is the text that sample k of a decoder would be (`gpt_dataset`, `blend`: the same files, caches and order),
with noise drawn from (seed, k). So samples do not depend on layouts or on what was read before, a run resumes at any
sample, and an epoch later the same text has other noise.

Sentinels are the ids `<extra_id_0>`, `<extra_id_1>` ... of the tokenizer. To a tokenizer without these 100 are added
behind its vocabulary, and behind them one for `decoder_start_token_id`, which no text may have.

Raffel et al. 2020 (arXiv 1910.10683), section 3.1.4; `random_spans_noise_mask` of github.com/google-research/
text-to-text-transfer-transformer. Megatron-LM: `megatron/core/datasets/t5_dataset.py`, which masks words and documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minimegatron.config.encoder_decoder import corrupted_lengths, noise_of, raw_length
from minimegatron.data.gpt_dataset import Batch, Dataset, Objective, SampleDataset
from minimegatron.data.tokenizer import Tokenizer
from minimegatron.errors import ConfigError, require

if TYPE_CHECKING:
    from minimegatron.config.run import RunConfig

EXTRA_IDS = 100
ADDED_IDS = EXTRA_IDS + 1  # to a tokenizer without sentinels


@dataclasses.dataclass(frozen=True)
class SpanCorruption(Objective):
    """How a text becomes a source and a target.

    Attributes:
        sentinels: their ids, in the order in which they are used.
        start: id with which the decoder begins.
        eod: id that ends a source and a target.
        vocab_size: ids of the tokenizer and those that were added.
        source, target: positions of a row that belong to each.
        seed: of the noise.
    """

    sentinels: tuple[int, ...]
    start: int
    eod: int
    vocab_size: int
    source: int
    target: int
    seed: int

    @classmethod
    def of(cls, run: RunConfig, tokenizer: Tokenizer) -> SpanCorruption:
        """That of a run.

        Raises:
            ConfigError: a row is too short for its source's target, or the decoder begins with a word of the tokenizer.
        """
        model, s, words = run.model, run.data.seq_length, tokenizer.spellings()
        found = [words[name] for i in range(EXTRA_IDS) if (name := f"<extra_id_{i}>") in words]
        size, start = tokenizer.vocab_size, model.decoder_start_token_id
        if not found:
            require(
                start in (size + EXTRA_IDS, tokenizer.pad),
                f"decoder_start_token_id {start} is a word of the tokenizer, or a sentinel",
                f"--decoder-start-token-id {size + EXTRA_IDS}, which is added to the vocabulary",
            )
            found, size = list(range(size, size + EXTRA_IDS)), size + ADDED_IDS
        source = model.source_length(s)
        made = cls(tuple(found), start, tokenizer.eod, size, source, s - source, run.training.seed)
        spans, needed = noise_of(made.raw)[1], corrupted_lengths(made.raw)[1]
        require(
            needed <= made.target,
            f"{s} tokens a row, of which {source} are the source: what was taken from {made.raw} tokens is a target of "
            f"{needed}, and {made.target} are left",
            f"decoder_seq_length of at least {needed}, with seq_length {source + needed}; or none, which always fits",
        )
        require(
            spans <= len(found),
            f"a source of {source} tokens has {spans} spans, and there are {len(found)} sentinels",
            "a smaller seq_length",
        )
        return made

    def text_length(self, s: int) -> int:
        """See `raw`."""
        return self.raw

    def of_texts(self, texts: Dataset) -> Dataset:
        """The texts, corrupted."""
        return CorruptedDataset(texts, self)

    @property
    def raw(self) -> int:
        """L, tokens of a text."""
        return raw_length(self.source)

    def row(self, text: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The source and the target of sample k, whose text [L] this is."""
        noise, spans = noise_of(len(text))
        rng = np.random.default_rng((self.seed, k))
        lengths = np.stack([_lengths(len(text) - noise, spans, rng), _lengths(noise, spans, rng)], 1).flatten()
        pieces = np.split(text, np.cumsum(lengths)[:-1])  # text, noise, text, noise ...
        source, target = list[Any](), list[Any]()
        for sentinel, kept, taken in zip(self.sentinels, pieces[::2], pieces[1::2], strict=False):
            source += [kept, [sentinel]]
            target += [[sentinel], taken]
        return np.concatenate([*source, [self.eod]]), np.concatenate([*target, [self.eod]])

    def batch(self, texts: np.ndarray, samples: Sequence[int]) -> Batch:
        """Rows of texts [b, L]: tokens, labels, position_ids [b, s] int64, and loss_mask [b, s] float32."""
        rows = [self.row(text, k) for text, k in zip(texts, samples, strict=True)]
        tokens = np.zeros((len(rows), self.source + self.target), dtype=np.int64)
        labels, counted = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=np.float32)
        for i, (source, target) in enumerate(rows):
            end = self.source + len(target)
            tokens[i, : self.source] = source
            tokens[i, self.source : end] = [self.start, *target[:-1]]
            labels[i, self.source : end], counted[i, self.source : end] = target, 1.0
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
        made = {"tokens": tokens, "labels": labels, "loss_mask": counted, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in made.items()}


class CorruptedDataset(SampleDataset):
    """Samples of a decoder's pre-training, corrupted.

    Args:
        texts: samples of L tokens.
        corruption: what becomes of them.
    """

    def __init__(self, texts: Dataset, corruption: SpanCorruption) -> None:
        self.texts, self.corruption = texts, corruption
        self.read_epochs, self.begun = texts.read_epochs, texts.begun

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, samples: Sequence[int]) -> Batch:
        """The samples as one batch: see `SpanCorruption.batch`."""
        return self.corruption.batch(self.texts.batch(samples)["tokens"].numpy(), samples)


def check_span_corruption(run: RunConfig) -> None:
    """Refuse what does not go with it.

    Raises:
        ConfigError: another task, or masks of documents.
    """
    if run.task is not None:
        raise ConfigError(
            f"minimegatron {run.task_name} with encoder_num_layers: that is learned from next tokens of a decoder",
            fix="minimegatron train, or a decoder",
        )
    names = ("sequence_packing", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    given = [name for name in names if getattr(run.data, name)]
    require(
        not given,
        f"{', '.join(given)} with encoder_num_layers: a sample is a text of the stream, and what was taken from it",
        f"drop {', '.join(given)}",
    )


def _lengths(tokens: int, pieces: int, rng: np.random.Generator) -> np.ndarray:
    """Random lengths of this many pieces, each at least 1: all ways are equally likely."""
    begins = np.zeros(tokens - 1, dtype=np.int64)
    begins[: pieces - 1] = 1
    rng.shuffle(begins)
    return np.bincount(np.concatenate(([0], begins.cumsum())), minlength=pieces)
