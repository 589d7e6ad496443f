"""Samples for BERT: what is hidden, what a pair is made of, and that sample k depends on the seed and k alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from minimegatron.data.bert_dataset import BertDataset
from minimegatron.data.gpt_dataset import GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, NullTokenizer
from minimegatron.data.whole_words import MaskedWords
from minimegatron.errors import DataError
from tests.data.test_indexed import write

LENGTHS, S = [40, 1, 25, 3, 61, 18, 5, 33], 16
CLS, SEP, MASK = 1000, 1001, 1002


def corpus(folder: Any, lengths: list[int] = LENGTHS) -> IndexedDataset:
    """Documents that hold 1, 2, 3 ... consecutively, so that every token names its place."""
    starts = np.cumsum([1, *lengths]).tolist()
    return IndexedDataset(write(folder / "x", [[list(range(a, b))] for a, b in zip(starts, starts[1:], strict=False)]))


def samples(
    folder: Any, s: int = S, num_samples: int | None = None, pairs: bool = True, seed: int = 7, **more: Any
) -> BertDataset:
    masking = MaskedWords.of(NullTokenizer(999), more.pop("probability", 0.15), pairs)
    config = GPTDatasetConfig(s, NullTokenizer(999), seed)
    dataset = more.pop("dataset", None) or corpus(folder)
    return masking.of_documents(dataset, np.arange(len(dataset)), num_samples, config)


def restored(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The rows with the hidden words in their places."""
    return torch.where(batch["loss_mask"] > 0, batch["labels"], batch["tokens"])


@pytest.mark.parametrize("pairs", [True, False])
def test_a_row_is_its_texts_between_marks(tmp_path, pairs):
    data = samples(tmp_path, pairs=pairs, num_samples=40)
    batch = data.batch(range(40))
    assert all(batch[name].shape == (40, S) for name in batch) and ("pair_mask" in batch) == pairs
    for k in range(40):
        texts, other = data.texts(k)
        want = [CLS, *texts[0], SEP, *((*texts[1], SEP) if pairs else ())]
        row = {name: tensor[k].tolist() for name, tensor in batch.items()}
        assert restored(batch)[k].tolist() == [*want, *[0] * (S - len(want))]
        assert row["document_ids"] == [0] * len(want) + [1] * (S - len(want)) and row["position_ids"] == list(range(S))
        first = len(texts[0]) + 2
        assert row["tokentype_ids"] == [0] * first + [1] * (len(want) - first) + [0] * (S - len(want))
        hidden = [i for i in range(S) if row["loss_mask"][i]]
        assert hidden and all(0 < i < len(want) and want[i] not in (CLS, SEP) for i in hidden)
        if pairs:
            assert row["labels"][0] == other and row["pair_mask"] == [float(len(hidden)), *[0.0] * (S - 1)]


def test_half_of_the_pairs_are_of_two_documents(tmp_path):
    """A text that follows begins where the first ends; another one is of another document, and no longer."""
    data = samples(tmp_path, num_samples=600)
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    others = 0
    for k in range(600):
        (first, second), other = data.texts(k)
        one, two = (set(document[text - 1].tolist()) for text in (first, second))
        assert len(one) == len(two) == 1 and (one != two) == other
        assert other or second[0] == first[-1] + 1
        assert 2 <= len(first) + len(second) <= S - 3
        others += other
    assert 220 <= others <= 380  # 6.5 standard deviations


def test_every_token_is_in_one_piece_of_an_epoch(tmp_path):
    """But the end of a document, which is no text, and what is left of one if that is less than three tokens."""
    data = samples(tmp_path, pairs=False)
    seen = np.concatenate([data.texts(k)[0][0] for k in range(len(data))])
    first = 1
    for length in LENGTHS:
        of_document = np.sort(seen[(seen >= first) & (seen < first + length)])
        assert of_document.tolist() == list(range(first, first + len(of_document)))
        assert length - 3 <= len(of_document) <= length - 1
        first += length


def test_a_sample_is_a_function_of_the_seed_and_its_number(tmp_path):
    """Alone or in a batch, after whichever others; in another epoch and with another seed it is another one."""
    data = samples(tmp_path, num_samples=100)
    again = samples(tmp_path, num_samples=100, dataset=data.dataset)
    whole = data.batch(range(100))
    for k in (70, 3, 99, 4):
        assert all(torch.equal(tensor, whole[name][k]) for name, tensor in again[k].items())
    epoch = int(data.starts[-1])
    firsts = [sorted(int(data.texts(k)[0][0][0]) for k in range(e * epoch, (e + 1) * epoch)) for e in (0, 1)]
    assert firsts[0] == firsts[1] and data.epoch_of(epoch) == 1, "each piece once"
    masks = whole["loss_mask"].flatten(1)
    assert any(not torch.equal(masks[k], masks[epoch + k]) for k in range(5))
    assert not torch.equal(samples(tmp_path, seed=8, dataset=data.dataset).batch([0])["tokens"], whole["tokens"][:1])


def test_eighty_ten_ten(tmp_path):
    """Of the hidden words; what takes the place of one is any id of the tokenizer, and no special one."""
    data = samples(tmp_path, s=67, num_samples=400, probability=0.3)
    counts, total, changed = {"mask": 0, "kept": 0, "other": 0}, 0, set()
    for start in range(0, 400, 100):
        batch = data.batch(range(start, start + 100))
        hidden = batch["loss_mask"] > 0
        tokens, labels = batch["tokens"][hidden], batch["labels"][hidden]
        total += len(tokens)
        counts["mask"] += int((tokens == MASK).sum())
        counts["kept"] += int((tokens == labels).sum())
        others = tokens[(tokens != MASK) & (tokens != labels)]
        counts["other"] += len(others)
        changed |= set(others.tolist())
    for name, share in (("mask", 0.8), ("kept", 0.1), ("other", 0.1)):
        deviation = (share * (1 - share) / total) ** 0.5
        assert abs(counts[name] / total - share) <= 6 * deviation + 0.001, (name, counts, total)
    assert changed <= set(range(999)) and len(changed) > 100


def test_hidden_words_are_whole_and_a_share_of_the_tokens():
    """WordPiece: what begins with ## belongs to the word before it."""
    masking = of_wordpiece({"[CLS]": 0, "[SEP]": 1, "[MASK]": 2, "a": 3, "b": 4, "##c": 5, "##d": 6, "[PAD]": 7})
    texts = [np.array([3, 5, 6, 4, 3, 5] * 5), np.array([5, 4, 6])]  # a text begins a word, whatever it begins with
    whole = np.concatenate(texts)
    begins = np.flatnonzero((whole < 5) | (np.arange(33) == 30))
    for seed in range(50):
        hidden = masking.hidden(texts, np.random.default_rng(seed)).tolist()
        words = [set(range(a, b)) for a, b in zip(begins, [*begins[1:], 33], strict=True)]
        assert set().union(*(word for word in words if word & set(hidden))) == set(hidden)
        assert 3 <= len(hidden) <= round(0.15 * 33) and hidden == sorted(hidden)
    long = [np.array([3, *[5] * 9])]
    assert masking.hidden(long, np.random.default_rng(0)).tolist() == list(range(10)), "at least one word"


def of_wordpiece(vocabulary: dict[str, int]) -> MaskedWords:
    return MaskedWords.of(Spelled(vocabulary), 0.15, True)  # type: ignore[arg-type]


class Spelled(NullTokenizer):
    """Ids with these spellings, and BERT's names of special ones."""

    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}  # noqa: RUF012

    def __init__(self, vocabulary: dict[str, int]) -> None:
        super().__init__(len(vocabulary) - 1)
        self.vocabulary = vocabulary

    def spellings(self) -> dict[str, int]:
        return self.vocabulary


def test_special_ids_are_the_tokenizers_or_follow_its_vocabulary():
    own = of_wordpiece({"a": 0, "[CLS]": 1, "b": 2, "[SEP]": 3, "[MASK]": 4, "##c": 5})
    assert (own.cls, own.sep, own.mask, own.vocab_size) == (1, 3, 4, 6) and own.words.tolist() == [0, 2]
    added = MaskedWords.of(NullTokenizer(10), 0.15, True)
    assert (added.cls, added.sep, added.mask, added.vocab_size) == (11, 12, 13, 14)


def test_letters_after_letters_continue_a_word():
    """Without WordPiece's mark: bytes, and byte-level BPE with its mark of a blank."""
    masking = MaskedWords.of(ByteTokenizer(), 0.15, True)
    text = "def f_2(naïve): é"
    found = masking.beginnings(np.array(ByteTokenizer().tokenize(text))).tolist()
    data = text.encode()
    words = [data[a:b].decode() for a, b in zip(found, [*found[1:], len(data)], strict=True)]
    assert words == ["def", " ", "f_2", "(", "naïve", ")", ":", " ", "é"]
    bpe = of_wordpiece({"Ġdo": 0, "ing": 1, "Ġ(": 2, "x": 3, "Ċ": 4, "[CLS]": 5, "[SEP]": 6, "[MASK]": 7, "###": 8})
    assert bpe.beginnings(np.array([0, 1, 2, 3, 4, 3, 8, 0, 3])).tolist() == [0, 2, 3, 4, 5, 6, 7]


def test_marks_around_a_text_are_taken_off(tmp_path):
    """Of a tokenizer that puts [CLS] and [SEP] around every text, [SEP] being its end of a document, too."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4} | {chr(97 + i): 5 + i for i in range(20)}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary,
             "max_input_chars_per_word": 9}  # fmt: skip
    added = [{"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for text, i in list(vocabulary.items())[:5]]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "mask", "pad", "unk")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.eod == 3
    text = [2, *range(5, 15), 3, 3]
    dataset = IndexedDataset(write(tmp_path / "y", [[text], [text]]))
    masking, config = MaskedWords.of(tokenizer, 0.15, True), GPTDatasetConfig(16, tokenizer)
    for row in restored(masking.of_documents(dataset, np.arange(2), 8, config).batch(range(8))).tolist():
        assert row.count(2) == 1 and row[0] == 2 and row.count(3) == 2, row


def test_what_cannot_be_made_into_samples_is_refused(tmp_path):
    with pytest.raises(DataError, match="samples of 4 tokens have no room"):
        samples(tmp_path, s=4)
    with pytest.raises(DataError, match="1 of them of 4 tokens or more: a pair is made of two"):
        samples(tmp_path, dataset=corpus(tmp_path, [30, 2]))
    bad = samples(tmp_path, dataset=corpus(tmp_path, [600, 600]), num_samples=100)
    with pytest.raises(DataError, match=r"outside the vocabulary \[0, 1000\)") as refused:
        bad.batch(range(100))
    assert "document 1" in str(refused.value)
