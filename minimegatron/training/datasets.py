"""The data of a run: the tokenizer, the size of the vocabulary, and the three sets of samples.

| flags                       | tokenizer                          | vocabulary of the model                    |
|-----------------------------|------------------------------------|--------------------------------------------|
| `--data-path` and the like  | `--tokenizer-type` (required)      | the tokenizer's; a larger one may be given |
| `--corpus stdlib`, `hf:...` | byte-level BPE, trained once, kept | as given (default 4096)                    |
| `--mock-data`               | numbers; or `--tokenizer-type`     | as given; or the tokenizer's               |

`NullTokenizer` has one id more than `--vocab-size` says, the end of document, and so has the model; as in Megatron. A
BERT has up to three more, for the special ids that its tokenizer lacks (`data/whole_words`); tokenizers of corpora and
of mock data are made so much smaller.

Rank 0 builds index arrays and corpora while the others wait; then all ranks read them. An error on rank 0 is raised on
every rank.

Megatron-LM: `build_train_valid_test_datasets` in `megatron/training/training.py`, `pretrain_gpt.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from minimegatron import trace
from minimegatron.comm.agree import gather_objects, on_all_ranks, on_rank_zero
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch
from minimegatron.config.run import RunConfig
from minimegatron.data.bert_dataset import BertDataset
from minimegatron.data.blend import BlendedDataset
from minimegatron.data.builder import build_datasets, parse_data_path, read_data_args
from minimegatron.data.corpus import prepare_corpus
from minimegatron.data.gpt_dataset import Batch, Dataset, GPTDataset, GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.loader import DataLoader
from minimegatron.data.packing import PackedDataset
from minimegatron.data.tokenizer import NullTokenizer, Tokenizer, build_tokenizer
from minimegatron.errors import ConfigError, require
from minimegatron.launch.agreement import require_agreement
from minimegatron.training.model_class import class_of_run

CORPUS_KINDS = {"stdlib": "both", "stdlib-code": "code", "stdlib-docs": "docs"}
CORPUS_VOCABULARY = 4096
BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of a data file that are hashed: terabytes are not read to start a run


@dataclasses.dataclass(frozen=True)
class RunData:
    """The tokenizer and the sets of samples of a run.

    Attributes:
        tokenizer: the tokenizer.
        vocab_size: V of the model, at least the tokenizer's.
        train, valid, test: samples; None for a set that is not given.
        files: the files that hold the tokens.
        trained_on: (contents, prefix) of each file of the training data, with its share and its documents: a run that
            goes on must have the same contents, in any place.
        tokenizer_model: folder of the tokenizer, or its `tokenizer.json`, if it has one.
    """

    tokenizer: Tokenizer
    vocab_size: int
    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    files: tuple[str, ...] = ()
    trained_on: tuple[tuple[str, str], ...] = ()
    tokenizer_model: str | None = None

    def facts(self) -> dict[str, Any]:
        """Facts about the data that must be equal on every rank, for `launch.agreement`; folders may differ between
        nodes."""
        facts: dict[str, Any] = {
            f"data file {k} ({os.path.basename(path)})": file_fact(path) for k, path in enumerate(self.files)
        }
        sets = {"train": self.train, "valid": self.valid, "test": self.test}
        facts |= {f"number of {name} samples": len(data) for name, data in sets.items() if data is not None}
        facts["training data"] = [contents for contents, _ in self.trained_on]
        return facts | {"tokenizer": self.tokenizer.identity, "vocab_size": self.vocab_size}


Joint = tuple[int | None, int | None, int | None]


def tokens_of(dataset: Dataset, sample: int) -> str:
    """Digest of the tokens of a sample; "" where there is none, or where a run makes its samples itself (rollouts)."""
    if not getattr(dataset, "known", False) or sample >= len(dataset):
        return ""
    return digest([dataset.batch([sample])["tokens"].numpy().tobytes()])


def load_data(
    run: RunConfig,
    mesh: Mesh,
    num_samples: tuple[int, int, int],
    joint: Joint = (None, None, None),
    quiet: bool = False,
) -> RunData:
    """Load the tokenizer and the datasets, made by rank 0 first; all ranks must call it.

    Args:
        run: names the data, and the vocabulary if one was set.
        mesh: the ranks.
        num_samples: samples wanted of train, valid and test.
        joint: samples of each set that are in Megatron's order (`data/indices`).
        quiet: show no progress bar, however long it takes.

    Raises:
        ConfigError, DataError: on every rank; also when the ranks have opened different data.
    """
    return load_on_rank_zero_first(lambda progress: _load(run, num_samples, joint, progress), mesh, quiet)


def load_on_rank_zero_first(load: Callable[[bool], RunData], mesh: Mesh, quiet: bool) -> RunData:
    """Load data on rank 0, which may have to make files, and then on the other ranks; compare what they opened.

    Args:
        load: loads; its argument says whether to show a progress bar.
        mesh: the ranks.
        quiet: show no progress bar.

    Raises:
        ConfigError, DataError: on every rank; also when the ranks have opened different data.
    """
    loaded: list[RunData] = []
    on_rank_zero(lambda: loaded.append(load(not quiet)), mesh.world)
    data = on_all_ranks(lambda: loaded[0] if loaded else load(False), mesh.world)
    require_agreement(gather_objects(on_all_ranks(data.facts, mesh.world), mesh.world))
    return data


def _load(run: RunConfig, num_samples: tuple[int, int, int], joint: Joint, progress: bool) -> RunData:
    data, chosen = run.data, run.model.vocab_size if "vocab_size" in run.given else None
    data_path: tuple[str, ...] = tuple(read_data_args(data.data_args_path)) if data.data_args_path else data.data_path
    folder = data.tokenizer_model
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.corpus:
        kind = CORPUS_KINDS.get(data.corpus, data.corpus)
        size = (chosen or CORPUS_VOCABULARY) - _marks(run)
        corpus = prepare_corpus(data.corpus_path, size, kind, data.corpus_key, data.corpus_megabytes, progress)
        tokenizer: Tokenizer = corpus.tokenizer()
        data_path, folder = (corpus.data_path,), corpus.tokenizer_model
    else:
        tokenizer = _tokenizer(run, chosen)
    vocab_size = vocab_size_of(tokenizer, chosen)
    objective = class_of_run(run).objective(run, tokenizer)
    if objective is not None:
        vocab_size = max(vocab_size, objective.vocab_size)
    config = GPTDatasetConfig(
        data.seq_length if objective is None else objective.text_length(data.seq_length),
        tokenizer,
        run.training.seed,
        data.reset_position_ids,
        data.reset_attention_mask,
        data.eod_mask_loss,
        data.data_cache_path,
        data.sequence_packing,
        progress,
        objective,
    )
    train, valid, test = build_datasets(
        config, num_samples, data_path, data.split, per_split if any(per_split) else None, joint=joint
    )
    blends = [parse_data_path(words)[0] for words in (data_path, *per_split) if words]
    files = [
        prefix + suffix for prefix in sorted({p for blend in blends for p in blend}) for suffix in (".bin", ".idx")
    ]
    trained_on = () if train is None else tuple(_contents(train))
    sets: dict[str, Dataset | None] = {"train": train, "valid": valid, "test": test}
    if objective is not None:
        sets = {name: None if each is None else objective.of_texts(each) for name, each in sets.items()}
    return RunData(tokenizer, vocab_size, **sets, files=tuple(files), trained_on=trained_on, tokenizer_model=folder)


def _marks(run: RunConfig) -> int:
    """How many ids of the model a tokenizer that is made here leaves to the objective.

    Raises:
        ConfigError: nothing is left for words.
    """
    count, size = class_of_run(run).added_ids, run.model.vocab_size
    require(size > count + 1, f"vocab_size is {size}, and {count + 1} ids are no words", f"at least {count + 2}")
    return count


def _contents(dataset: GPTDataset | PackedDataset | BertDataset | BlendedDataset) -> Iterator[tuple[str, str]]:
    """(Digest of what is read, prefix) of each file."""
    parts: list[tuple[GPTDataset | PackedDataset | BertDataset, list[str]]]
    if isinstance(dataset, BlendedDataset):
        shares = zip(dataset.datasets, dataset.shares, strict=True)
        parts = [(part, [f"share {share:.12g}"]) for part, share in shares]
    else:
        parts = [(dataset, [])]
    for part, words in parts:
        source = part.dataset
        if isinstance(source, IndexedDataset):
            words += [file_fact(source.bin_path), f"index {source.idx_sha256[:12]}"]
        yield ", ".join([*words, f"documents {part.documents[0]} to {part.documents[-1]}"]), part.name


def _tokenizer(run: RunConfig, chosen: int | None) -> Tokenizer:
    data = run.data
    if data.tokenizer_type is None:
        if not data.mock_data:
            raise ConfigError(
                "--data-path without --tokenizer-type: which id ends a document, and how many are there?",
                fix="--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER, or NullTokenizer --vocab-size N",
            )
        return NullTokenizer(run.model.vocab_size - 1 - _marks(run))
    null = data.tokenizer_type == "NullTokenizer"
    return build_tokenizer(
        data.tokenizer_type, data.tokenizer_model, chosen if null else None, data.vocab_file, data.merge_file
    )


def vocab_size_of(tokenizer: Tokenizer, chosen: int | None) -> int:
    if isinstance(tokenizer, NullTokenizer) or chosen is None:
        return tokenizer.vocab_size
    if chosen < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size is {chosen}, but the tokenizer has {tokenizer.vocab_size} ids",
            fix=f"drop --vocab-size, or choose at least {tokenizer.vocab_size}; a published model has its own",
        )
    return chosen


def microbatches(
    dataset: Dataset,
    micro_batch_size: int,
    mesh: Mesh,
    consumed_samples: int,
    device: torch.device,
    replica: int | None = None,
) -> Iterator[Batch]:
    """This rank's microbatches on its device, cut over cp; the ranks of a tp or cp group read the same ones.

    Args:
        dataset: the samples, in order.
        micro_batch_size: samples of a microbatch.
        mesh: its `dp` axis shares the samples, its cp axes share each sequence.
        consumed_samples: samples of all ranks, so far.
        device: where the tensors go.
        replica: the position on dp whose samples these are; default this rank's.
    """
    replica = mesh.dp.rank if replica is None else replica
    loader = DataLoader(dataset, micro_batch_size, replica, mesh.dp.size, consumed_samples=consumed_samples)
    samples = iter(loader)
    while True:
        with trace.span("data", "data"):
            batch = next(samples, None)
            if batch is None:
                return
            part = cut_batch(batch, mesh)  # labels were shifted before, so each rank has the label of its last token
            part = to_device(part, device)
        yield part


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, without waiting for work that is queued on the device.

    A GPU copies asynchronously only from pinned memory; else the host waits until the copy has been made, after
    everything that was launched before. torch keeps pinned memory until the copy is done, and reuses it for the next
    batch, so nothing here needs to hold it.
    """
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def file_fact(path: str) -> str:
    """Size and digest of a file; of a large one, of blocks at equal distances, the first and the last among them."""
    size = os.path.getsize(path)
    starts = {(size - BLOCK_BYTES) * k // (BLOCKS - 1) for k in range(BLOCKS)} if size > BLOCK_BYTES else {0}
    with open(path, "rb") as file:
        return f"{size} bytes ({digest(_block(file, start) for start in sorted(starts))})"


def _block(file: Any, start: int) -> bytes:
    file.seek(start)
    return bytes(file.read(BLOCK_BYTES))


def digest(pieces: Iterable[bytes]) -> str:
    total = hashlib.blake2b(digest_size=6)
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()
