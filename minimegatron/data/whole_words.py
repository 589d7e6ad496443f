"""Words that are hidden whole, for models that predict hidden words (BERT).

    a  tokeni ##zer  splits         WordPiece: what begins with ## continues a word
    Ġa Ġtoken izer   Ġsplits        byte-level BPE, bytes: a letter or digit that follows one does
       ------------                 one word

A token that continues a word is hidden with it, else its neighbours give it away. Words are taken in random order, as
many as fit into 15 % of the tokens, at least one.

A tokenizer without [CLS], [SEP] or [MASK] gets ids behind its vocabulary for them, and the model as many rows more.

Whole words: the code of Devlin et al. 2019 (arXiv 1810.04805), May 2019. Megatron-LM: `_create_masked_lm_predictions`
in `megatron/core/datasets/masked_dataset.py`, which knows the words of WordPiece alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from minimegatron.data.bert_dataset import BertDataset
from minimegatron.data.gpt_dataset import GPTDatasetConfig, LowLevelDataset, Objective
from minimegatron.data.tokenizer import NO_PAD, Tokenizer

MARKS = ("cls", "sep", "mask")  # the special ids
BLANKS = "▁ĠĊĉč"  # how vocabularies spell a blank, a line's end and a tabulator before a word


@dataclasses.dataclass(frozen=True, eq=False)
class MaskedWords(Objective):
    """How words of a tokenizer are hidden, and its special ids.

    Attributes:
        cls, sep, mask, pad: ids; behind the tokenizer's vocabulary where it has none (`pad`: 0).
        vocab_size: ids of the tokenizer and of these together.
        words: ids that may stand for a hidden one.
        opens, closes: [vocab_size] bool: the id begins, ends with a letter or digit; a token continues a word if it
            opens and the one before closes.
        probability: share of the tokens that are hidden.
        pairs: whether samples are pairs of texts.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    vocab_size: int
    words: np.ndarray
    opens: np.ndarray
    closes: np.ndarray
    probability: float
    pairs: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, probability: float, pairs: bool) -> MaskedWords:
        """Those of a tokenizer."""
        spelled = tokenizer.spellings()
        named = {name: spelled.get(text) for name, text in getattr(tokenizer, "named", {}).items()}
        size, ids = tokenizer.vocab_size, dict[str, int]()
        for name in MARKS:
            found = named.get(f"{name}_token")
            ids[name], size = (size, size + 1) if found is None else (found, size)
        marked = sum(text.startswith("##") and len(text) > 2 for text in spelled)  # of code, ### may be a word
        pieces = marked > sum(text[:1] in BLANKS and len(text) > 1 for text in spelled)
        opens, closes = np.zeros(size, bool), np.full(size, pieces)
        for text, token in spelled.items():
            if pieces:
                opens[token] = text.startswith("##")
            elif text:
                opens[token], closes[token] = _letter(text[0]), _letter(text[-1])
        special = {*ids.values(), tokenizer.eod, tokenizer.pad, *getattr(tokenizer, "special_ids", ())}
        words = np.setdiff1d(np.arange(tokenizer.vocab_size), np.array(sorted(special)))
        pad = 0 if tokenizer.pad == NO_PAD else tokenizer.pad
        return cls(**ids, pad=pad, vocab_size=size, words=words, opens=opens, closes=closes, probability=probability,
                   pairs=pairs)  # fmt: skip

    def of_documents(
        self, dataset: LowLevelDataset, documents: np.ndarray, num_samples: int | None, config: GPTDatasetConfig
    ) -> BertDataset:
        """Samples of a text or a pair."""
        return BertDataset(dataset, documents, num_samples, config, self)

    @property
    def added(self) -> int:
        """How many tokens a full sample has beside its text."""
        return 3 if self.pairs else 2

    def beginnings(self, text: np.ndarray) -> np.ndarray:
        """Places [n'] of a text [n] at which a word begins, ascending; the first is 0."""
        continues = self.opens[text[1:]] & self.closes[text[:-1]]
        return np.concatenate(([0], np.flatnonzero(~continues) + 1))

    def hidden(self, texts: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Places in the texts, end to end, that are hidden: whole words, `probability` of the tokens, at least one."""
        starts = np.cumsum([0, *map(len, texts)])
        begun = [start + self.beginnings(text) for start, text in zip(starts, texts, strict=False)]
        edges = np.append(np.concatenate(begun), starts[-1])
        wanted, places = max(1, round(self.probability * int(starts[-1]))), list[int]()
        order = rng.permutation(len(edges) - 1)
        for word in order:
            span = range(edges[word], edges[word + 1])
            if len(places) + len(span) <= wanted:
                places.extend(span)
        if not places:  # each is longer than all that is to be hidden
            word = order[np.argmin(np.diff(edges)[order])]
            places.extend(range(edges[word], edges[word + 1]))
        return np.array(sorted(places))


def _letter(sign: str) -> bool:
    """Whether a sign of a vocabulary is a letter or a digit; a byte of a longer UTF-8 sequence counts as one."""
    return sign not in BLANKS and (sign.isalnum() or sign == "_" or ord(sign) >= 0x80)
