"""A data set of the Hugging Face hub, or a folder with the same files, as documents that are read as they arrive.

| name                             | files, in the order of their names                                                |
|----------------------------------|-----------------------------------------------------------------------------------|
| `hf:OWNER/NAME`                  | the Parquet files that the hub has made of the data set; else its own             |
| `hf:OWNER/NAME/CONFIG:SPLIT`     | of this configuration (default: the only one, or `default`) and split (`train`)   |
| `hf:FOLDER` (`./x`, `/data/x`)   | of this machine: Parquet, JSONL, text; of the split, where file names have splits |

The hub gives the bytes of a file that are asked for, so the first hundred megabytes of a data set of terabytes are a
hundred megabytes of traffic (a row group of Parquet at a time).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from minimegatron.data.documents import COMPRESSION_SUFFIXES, TEXT_SUFFIXES, reader_of
from minimegatron.data.formats import HUB, hub
from minimegatron.data.jsonl import parse_document
from minimegatron.errors import ConfigError, DataError

PREFIX = "hf:"
CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps a data set as Parquet
SUFFIXES = {".parquet", ".jsonl", ".json", ".ndjson", *TEXT_SUFFIXES}


class DataSet(NamedTuple):
    """What a name says.

    Attributes:
        path: OWNER/NAME, or a folder.
        config: the configuration, if one is named.
        split: the split.
    """

    path: str
    config: str
    split: str

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine, and not one of the hub."""
        return self.path.startswith((".", "/", "~")) or os.path.isdir(self.path)


def parse(name: str) -> DataSet:
    """The parts of `hf:OWNER/NAME/CONFIG:SPLIT`.

    Raises:
        ConfigError: it is no such name.
    """
    path, colon, split = name.removeprefix(PREFIX).rpartition(":")
    path, split = (path, split) if colon else (split, "train")
    found = DataSet(path, "", split)
    if not name.startswith(PREFIX) or not path or not split:
        raise ConfigError(f"{name!r} names no data set", fix="hf:OWNER/NAME, hf:OWNER/NAME/CONFIG:SPLIT or hf:FOLDER")
    if found.is_folder:
        return found._replace(path=os.path.expanduser(path))
    words = path.split("/")
    if not 1 <= len(words) <= 3 or not all(words):
        raise ConfigError(
            f"{name!r} names no data set", fix="hf:OWNER/NAME or hf:OWNER/NAME/CONFIG; a folder: hf:./FOLDER"
        )
    return DataSet("/".join(words[:2]), "".join(words[2:]), split)


def files_of(name: str) -> list[str]:
    """Paths of a data set's files, in order; those of the hub begin with `hf://`.

    Raises:
        ConfigError: no name of a data set; a configuration must be chosen.
        DataError: there is no such data set, or nothing in it that can be read.
    """
    wanted = parse(name)
    if wanted.is_folder:
        if not os.path.isdir(wanted.path):
            raise DataError("no such folder", where=wanted.path, fix="hf:FOLDER, or hf:OWNER/NAME of the hub")
        paths = [os.path.join(root, file) for root, _, files in os.walk(wanted.path) for file in files]
        return _readable(paths, wanted.path, wanted.split)
    top = f"datasets/{wanted.path}"
    files = hub()
    try:
        converted = files.exists(f"{top}@{CONVERTED}")
        found = files.find(f"{top}@{CONVERTED}" if converted else top)
    except Exception as error:  # the client's own classes, those of the network, and those of `fsspec`
        reason = str(error).split("\n")[0] or type(error).__name__
        fix = "is there internet, is the name right, is it private (HF_TOKEN)? Without internet: --corpus stdlib"
        raise DataError(f"the hub does not give it: {reason}", where=name, fix=fix) from error
    if converted:
        found = _of_config([HUB + path for path in found], wanted)
    return _readable([path if path.startswith(HUB) else HUB + path for path in found], name, wanted.split)


def _of_config(paths: list[str], wanted: DataSet) -> list[str]:
    """Those of the wanted configuration: the hub's names are CONFIG/SPLIT/0000.parquet."""
    configs = sorted({PurePath(path).parts[-3] for path in paths if path.endswith(".parquet")})
    config = wanted.config or (configs[0] if len(configs) == 1 else "default")
    if config not in configs:
        named = f"{PREFIX}{wanted.path}/{configs[0] if configs else 'CONFIG'}"
        raise ConfigError(
            f"the data set {wanted.path} has the configurations {', '.join(configs[:20])}, and not {config!r}",
            fix=named,
        )
    return [path for path in paths if PurePath(path).parts[-3] == config]


def _readable(paths: Sequence[str], where: str, split: str) -> list[str]:
    """Files in a format that is read; those of the split, where names have splits (folders or words: train-00000)."""
    known = [path for path in sorted(paths) if _suffix(path) in SUFFIXES and not PurePath(path).name.startswith(".")]
    if where.startswith(PREFIX):  # cards of data sets are no data
        known = [path for path in known if _suffix(path) != ".md"]
    base = where if not where.startswith(PREFIX) else ""
    words = {path: _words(path.removeprefix(base).removeprefix(HUB)) for path in known}
    if any({"train", "test", "validation"} & found for found in words.values()):
        known = [path for path in known if split in words[path]]
    if not known:
        fix = f"files that end in {', '.join(sorted(SUFFIXES))}; a split: hf:...:SPLIT"
        raise DataError(f"no file of the split {split!r} that can be read", where=where, fix=fix)
    return known


def _suffix(path: str) -> str:
    name = PurePath(path)
    return (name.with_suffix("") if name.suffix in COMPRESSION_SUFFIXES else name).suffix


def _words(path: str) -> set[str]:
    return set(path.replace("/", "-").replace(".", "-").replace("_", "-").split("-"))


def documents(name: str, key: str = "text", megabytes: float = 100) -> Iterator[tuple[str, str]]:
    """(file and row, text) of the first documents of a data set.

    Args:
        name: see the module's table.
        key: the column, or the key of a line of JSON, that holds the text.
        megabytes: stop after the document with which the texts reach this size (10^6 bytes of UTF-8).

    Raises:
        ConfigError: no name of a data set.
        DataError: the hub or a file does not give it; a row without text.
    """
    size = 0
    for path in files_of(name):
        for line in reader_of(path, [key]):
            try:
                if line.data is None:
                    raise DataError("a document of more than 64 MiB")
                texts = parse_document(line.data, (key,))[key]
            except DataError as error:
                fix = "--corpus-key names the column that holds the text; or preprocess --on-bad-line skip, by hand"
                raise DataError(error.what, where=f"{path}:{line.number}", fix=fix) from error
            text = "\n".join(texts)
            yield f"{path}:{line.number}", text
            size += len(text.encode("utf-8", "surrogatepass"))
            if size >= megabytes * 1e6:
                return
