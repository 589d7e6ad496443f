"""The samples of a task: lines of JSONL or built-in examples, encoded once, in rows.

Each line is encoded by rank 0 and kept in a cache beside the file (`--data-cache-path`), keyed by the contents of the
file, the tokenizer, the template and the length; the other ranks map the same arrays. A line that cannot be used ends
the run with its number: what is wrong with one line of a template is usually wrong with all.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minimegatron.checkpoint.companions import FOLDER
from minimegatron.checkpoint.hf_config import is_published
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.builder import parse_split
from minimegatron.data.documents import reader_of
from minimegatron.data.indices import cached_arrays, progress_bar
from minimegatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from minimegatron.data.tokenizer_files import PLAIN
from minimegatron.errors import ConfigError, DataError
from minimegatron.posttraining import examples
from minimegatron.posttraining.conversations import Encoder, Template, Tokens
from minimegatron.posttraining.rows import Items, RowDataset
from minimegatron.training.datasets import RunData, file_fact, load_on_rank_zero_first, vocab_size_of

Form = Callable[[Encoder, Mapping[str, Any]], list[Tokens]]


def load_rows(
    run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], form: Form, prefers: bool, quiet: bool
) -> RunData:
    """The rows of train, validation and test of a task; all ranks call it.

    Args:
        run: names the files, or the examples.
        mesh: the ranks.
        num_samples: rows wanted of each set.
        form: a line to the sequences of an item (`Encoder.conversation`, `Encoder.pair`).
        prefers: whether the items are pairs, for the built-in examples.
        quiet: show no progress bar.

    Raises:
        ConfigError, DataError: on every rank.
    """
    load = functools.partial(_load, run, num_samples, form, prefers)
    return load_on_rank_zero_first(load, mesh, quiet)


def _load(run: RunConfig, num_samples: tuple[int, int, int], form: Form, prefers: bool, progress: bool) -> RunData:
    data = run.data
    tokenizer, folder = tokenizer_of(run)
    encoder = Encoder(tokenizer, template_of(run, tokenizer))
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    read = functools.partial(items_of, run, encoder, form, prefers, progress=progress)
    sets: list[Items | None]
    if data.per_split:
        sets = [read(words) if words else None for words in per_split]
    else:
        sets = list(split(read(data.data_path), data.split))
    name = " ".join(data.train_data_path or data.data_path) or str(run.task.examples)
    train, valid, test = (
        RowDataset(x, data.seq_length, wanted, run.training.seed, data.sequence_packing, name)
        if x is not None and wanted
        else None
        for x, wanted in zip(sets, num_samples, strict=True)
    )
    trained_on = () if train is None else ((f"{train.items.digest}, {len(train.items)} examples", train.name),)
    files = tuple(sorted({word for words in (data.data_path, *per_split) for word in words}))
    vocab_size = vocab_size_of(tokenizer, chosen(run))
    return RunData(tokenizer, vocab_size, train, valid, test, files, trained_on, folder)


def chosen(run: RunConfig) -> int | None:
    """The size of the vocabulary that was set, or None."""
    return run.model.vocab_size if "vocab_size" in run.given else None


def tokenizer_of(run: RunConfig) -> tuple[Tokenizer, str | None]:
    """The tokenizer of the flags, else that of the folder which the run begins with; and its folder, if it has one.

    Special tokens in a text are read as tokens: a chat template writes them.
    """
    data = run.data
    if data.tokenizer_type is not None:
        null = data.tokenizer_type == "NullTokenizer"
        special = None if null or data.tokenizer_type == "ByteLevelTokenizer" else False
        tokenizer = build_tokenizer(
            data.tokenizer_type,
            data.tokenizer_model,
            chosen(run) if null else None,
            data.vocab_file,
            data.merge_file,
            split_special_tokens=special,
        )
        return tokenizer, data.tokenizer_model
    if run.checkpoint.load is not None:
        load = Path(run.checkpoint.load)
        folder = load if is_published(load) else load / FOLDER
        if (folder / "tokenizer.json").is_file():
            return HuggingFaceTokenizer(folder, split_special_tokens=False), str(folder)
    raise ConfigError(
        "which tokenizer? --load names no folder that has one",
        fix="--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER, or ByteLevelTokenizer",
    )


def template_of(run: RunConfig, tokenizer: Tokenizer) -> Template | None:
    """The template of `--chat-template`, else of the tokenizer; None if there is none."""
    given = run.task.chat_template
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if given is not None:
            raise ConfigError(
                f"--chat-template with {run.data.tokenizer_type}: it has no special tokens",
                fix="HuggingFaceTokenizer, or lines with texts",
            )
        return None
    if given is None:
        return None if tokenizer.chat_template is None else Template(tokenizer)
    if given == "plain":
        return Template(tokenizer, PLAIN, "plain")
    try:
        return Template(tokenizer, Path(given).read_text(encoding="utf-8"), given)
    except OSError as error:
        raise ConfigError(f"--chat-template: {error}", fix="a Jinja file, or `plain`") from error


def items_of(
    run: RunConfig, encoder: Encoder, form: Form, prefers: bool, paths: Sequence[str], progress: bool = False
) -> Items:
    """The items of files, or of the run's examples, encoded and cut to rows."""
    s = run.data.seq_length
    if run.task.examples is not None:
        found = examples.lines(run.task.examples, prefers, run.training.seed)
        return Items.of([form(encoder, line) for line in found], s)
    source = encoder._template.source if encoder._template is not None else ""
    description = {
        "arrays": f"items of {form.__qualname__}",
        "files": [file_fact(path) for path in paths],
        "tokenizer": encoder.tokenizer.identity,
        "template": hashlib.sha256(source.encode()).hexdigest(),
        "sequence_length": s,
    }

    def build() -> dict[str, np.ndarray]:
        items = Items.of(list(_encoded(encoder, form, paths, progress)), s)
        return items.arrays()

    return Items.from_arrays(cached_arrays(run.data.data_cache_path or f"{paths[0]}.cache", description, build))


def _encoded(encoder: Encoder, form: Form, paths: Iterable[str], progress: bool) -> Iterator[list[Tokens]]:
    for path in paths:
        bar = progress_bar(Path(path).stat().st_size, "encoding", progress)
        for line in reader_of(path):
            bar.update(line.position - bar.n)
            yield _one(encoder, form, line.data, f"{path}:{line.number}")
        bar.close()


def _one(encoder: Encoder, form: Form, data: bytes | None, where: str) -> list[Tokens]:
    try:
        if data is None:
            raise DataError("the line is too long")
        line = json.loads(data)
        if not isinstance(line, dict):
            raise DataError(f"a JSON object is expected, not {type(line).__name__}")
        return form(encoder, line)
    except (ValueError, DataError, ConfigError) as error:
        what = error.what if isinstance(error, (DataError, ConfigError)) else f"bad JSON: {error}"
        fix = getattr(error, "fix", "") or "mend or remove the line"
        raise DataError(what, where=where, fix=fix) from error


def split(items: Items, shares: str) -> Iterator[Items | None]:
    """Train, validation and test by `--split`; None for a part without an item."""
    for part in parse_split(shares):
        first, stop = (0, 0) if part is None else (round(edge * len(items)) for edge in part)
        yield items.part(first, stop) if stop > first else None
