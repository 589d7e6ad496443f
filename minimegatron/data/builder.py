"""The train, valid and test sets of a run from Megatron's flags.

| flags                                  | each of train, valid and test                                           |
|----------------------------------------|-------------------------------------------------------------------------|
| `--data-path P`                        | a part of the documents of P, for as many epochs as it takes            |
| `--data-path w1 P1 w2 P2`              | a part of each, blended by weight to the number of samples asked for    |
| `--data-path P1 P2 P3`                 | a part of each, one epoch of each                                       |
| `--train-data-path`, `--valid-...` ... | whole datasets by the same grammar; `--split` is not used               |
| `--mock-data`                          | a third of the mock documents                                           |

`--split 949,50,1` gives consecutive parts of the documents: shares are normalised, summed, and rounded to documents. A
test set whose share is rounded to no document is left out (`--split` has 0.1 % for it, and nobody asked for it by
name); a training or validation set is not. Of a blend of N samples dataset i gives ceil(N * w_i), and 0.5 % more are
prepared because a blend may draw one more.

In Megatron-LM: `blended_megatron_dataset_builder.py`, `blended_megatron_dataset_config.py` in `megatron/core/datasets`.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from minimegatron.data.bert_dataset import BertDataset
from minimegatron.data.blend import BlendedDataset, normalize
from minimegatron.data.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    LowLevelDataset,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.packing import PackedDataset
from minimegatron.data.tokenizer import NullTokenizer, Tokenizer
from minimegatron.errors import ConfigError, DataError

SURPLUS = 0.005
SPLITS = ("train", "valid", "test")

One = GPTDataset | PackedDataset | BertDataset
Tokens = One | BlendedDataset
Blend = tuple[list[str], list[float] | None]
Part = tuple[float, float]


def build_datasets(
    config: GPTDatasetConfig,
    num_samples: Sequence[int | None],
    data_path: Sequence[str] = (),
    split: str = "969,30,1",
    data_path_per_split: Sequence[Sequence[str] | None] | None = None,
    joint: Sequence[int | None] = (None, None, None),
) -> tuple[Tokens | None, Tokens | None, Tokens | None]:
    """Train, valid and test; see the table of this module. Every rank calls it and gets the same.

    Args:
        config: how tokens become samples.
        num_samples: of train, valid and test; None for one epoch.
        data_path: words of `--data-path`; without them and without `data_path_per_split`, mock data.
        split: shares of the documents.
        data_path_per_split: words of `--train-data-path`, `--valid-data-path` and `--test-data-path`.
        joint: for each set the number of samples in Megatron's order, which shuffles their epochs together (`indices`).

    Returns:
        One dataset each; None if the share or the number of samples is 0, and for a test set without a document.

    Raises:
        ConfigError: a flag that cannot be read.
        DataError: a file that cannot be used, or a part too small for a sample.
    """
    if data_path_per_split is not None and data_path:
        raise ConfigError("both --data-path and a path per split are given", fix="drop one of them")
    parts: Sequence[Part | None] = [(0.0, 1.0)] * 3
    blends: Sequence[Blend | None]
    if data_path_per_split is not None:
        blends = [parse_data_path(words) if words else None for words in data_path_per_split]
    elif data_path:
        blends, parts = [parse_data_path(data_path)] * 3, parse_split(split)
    else:
        blends, parts = [([], None)] * 3, parse_split("1,1,1")
    prefixes = sorted({prefix for blend in blends if blend for prefix in blend[0]})
    opened = {prefix: _open(prefix, config.tokenizer) for prefix in prefixes}
    sets: list[Tokens | None] = []
    for name, blend, part, size, together in zip(SPLITS, blends, parts, num_samples, joint, strict=True):
        if blend is None or part is None or size == 0:
            sets.append(None)
            continue
        weighed = zip(blend[0], blend[1] or [1.0] * len(blend[0]), strict=True)
        empty = [prefix for prefix, w in weighed if w and len(split_documents(part, len(opened[prefix]))) == 0]
        if empty and name == "test":
            sets.append(None)
            continue
        if empty:
            raise _no_document(name, part, empty[0], len(opened[empty[0]]))
        try:
            sets.append(_build_set(opened, blend, part, size, config, together))
        except DataError as error:
            raise DataError(error.what, where=f"{name} set; {error.where}", fix=error.fix) from error
    train, valid, test = sets
    return train, valid, test


def _open(prefix: str, tokenizer: Tokenizer) -> IndexedDataset:
    dataset = IndexedDataset(prefix, vocab_size=tokenizer.vocab_size)
    made_with = (dataset.sidecar or {}).get("tokenizer")
    if made_with not in (None, tokenizer.identity) and not isinstance(tokenizer, NullTokenizer):
        what = f"{prefix} was made with another tokenizer ({made_with}) than this run's ({tokenizer.identity})"
        warnings.warn(f"{what}; its ids may mean other words", stacklevel=3)
    return dataset


def _no_document(name: str, part: Part, prefix: str, documents: int) -> DataError:
    fix = "more documents"
    if documents > 1 and part != (0.0, 1.0):
        one = f"--split {documents - 1},1" if name == "valid" else f"--split 1,{documents - 1}"
        fix = f"{one} gives it one; or a larger share, or a file of its own (--{name}-data-path)"
    return DataError(
        f"the {name} set has {100 * (part[1] - part[0]):.3g} % of {documents} documents, which is none",
        where=prefix,
        fix=fix,
    )


def _build_set(
    opened: dict[str, IndexedDataset],
    blend: Blend,
    part: Part,
    size: int | None,
    config: GPTDatasetConfig,
    joint: int | None,
) -> Tokens:
    prefixes, weights = blend
    if not prefixes:
        documents = split_documents(part, MockGPTLowLevelDataset.num_documents)
        of_documents = _of_documents(MockGPTLowLevelDataset(config.tokenizer), documents, size, config)
        return of_documents or MockGPTDataset(documents, size, config, joint)
    if weights is None and len(prefixes) == 1:
        return _build_one(opened[prefixes[0]], part, size, config, joint)
    if weights is None:
        return BlendedDataset([_build_one(opened[prefix], part, None, config, None) for prefix in prefixes], None, size)
    if size is None:
        raise ConfigError(
            "a blend with weights needs a number of samples", fix="drop the weights to read each set once"
        )
    shares = normalize(weights)

    def share_of(samples: int, share: float) -> int:
        return math.ceil(math.ceil(samples * share) * (1 + SURPLUS))

    datasets = [
        _build_one(opened[p], part, share_of(size, w), config, None if joint is None else share_of(joint, w))
        for p, w in zip(prefixes, shares, strict=True)
        if w
    ]
    total = sum(math.ceil(size * share) for share in shares)
    return BlendedDataset(datasets, [weight for weight in weights if weight], total)


def _of_documents(dataset: LowLevelDataset, documents: np.ndarray, size: int | None, config: GPTDatasetConfig) -> Any:
    """The samples that are made of whole documents; None where a stream is cut."""
    if config.objective is not None:
        return config.objective.of_documents(dataset, documents, size, config)
    return PackedDataset(dataset, documents, size, config) if config.sequence_packing else None


def _build_one(
    dataset: IndexedDataset, part: Part, size: int | None, config: GPTDatasetConfig, joint: int | None
) -> One:
    documents = split_documents(part, len(dataset))
    try:
        return _of_documents(dataset, documents, size, config) or GPTDataset(dataset, documents, size, config, joint)
    except DataError as error:
        raise DataError(error.what, where=error.where or dataset.prefix, fix=error.fix) from error


def parse_split(split: str) -> list[Part | None]:
    """`--split 949,50,1`: the part [from, to) of the documents for train, valid and test; None for a share of 0.

    Raises:
        ConfigError: not one to three numbers, or all of them 0.
    """
    words = split.replace(" ", "").split(",")
    if len(words) > 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words):
        raise ConfigError(f"--split {split!r} is not one to three shares", fix="e.g. --split 949,50,1")
    shares = np.array([float(word) for word in words] + [0.0] * (3 - len(words)))
    if shares.sum() == 0:
        raise ConfigError(f"--split {split!r} gives no data to anybody", fix="e.g. --split 949,50,1")
    ends = [0.0]
    for share in (shares / shares.sum()).tolist():
        ends.append(ends[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in zip(ends[:-1], ends[1:], strict=True)]


def split_documents(part: Part, num_documents: int) -> np.ndarray:
    """The documents [round(from * n), round(to * n)) of a part, int32."""
    begin, end = (int(round(bound * float(num_documents))) for bound in part)
    return np.arange(begin, end, dtype=np.int32)


def parse_data_path(words: Sequence[str]) -> Blend:
    """`--data-path`: prefixes, or `weight prefix weight prefix ...`. Returns (prefixes, weights or None).

    Raises:
        ConfigError: nothing given, some prefixes weighted and some not, or a weight that is no share.
    """
    if not words:
        raise ConfigError("--data-path is empty", fix="give a prefix, or weight prefix weight prefix ...")
    numbers = [_number(word) for word in words[0::2]]
    if len(words) % 2 or all(number is None for number in numbers):
        return [word.strip() for word in words], None
    if any(number is None for number in numbers):
        bad = words[2 * numbers.index(None)]
        raise ConfigError(
            f"--data-path: {bad!r} stands where a weight is expected", fix="weight prefix weight prefix ..."
        )
    weights = [number for number in numbers if number is not None]
    if not all(0 <= weight < float("inf") for weight in weights) or sum(weights) == 0:
        raise ConfigError(f"--data-path: the weights {weights} are no shares", fix="numbers >= 0, one of them above 0")
    return [word.strip() for word in words[1::2]], weights


def read_data_args(path: str | os.PathLike[str]) -> list[str]:
    """`--data-args-path`: a file with the words of `--data-path`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data-args-path {path}: {error}", fix="give a text file of prefixes") from error


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
