"""What a rank of a training run was given, as plain data: what `launch/agreement` compares between ranks.

| facts                                                 | compared                        | because                 |
|-------------------------------------------------------|---------------------------------|-------------------------|
| fields of the configuration, but `rank_local` ones    | when the ranks meet             | groups follow from them |
| versions of Python, torch and numpy                   | when the ranks meet             | other numbers           |
| source files of this package, the file of `--spec`    | when the ranks meet             | one node was edited     |
| tokenizer, vocabulary, samples, data files            | when the data is open           | rank 0 makes some first |

Another version of torch is refused and not warned about: nothing promises that two versions speak the same protocol of
gloo or NCCL, and a kernel that sums in another order gives replicas that differ in their bits. Of Python the first two
numbers count, because those after them do not change what this package computes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch

import minimegatron
from minimegatron.training.run import SECTIONS, RunConfig

# Fields that a rank may have for itself, and why that changes nothing for the others.
RANK_LOCAL: dict[str, str] = {
    f.name: f.metadata["rank_local"] for cls in SECTIONS.values() for f in dataclasses.fields(cls)
    if f.metadata["rank_local"]
}  # fmt: skip
BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of a data file that are hashed: terabytes are not read to start a run


def run_facts(run: RunConfig) -> dict[str, Any]:
    """Facts that are known before the ranks meet: configuration, versions, code."""
    facts = {name: value for name, value in run.fields().items() if name not in RANK_LOCAL}
    facts["version of Python"] = ".".join(map(str, sys.version_info[:2]))
    facts["version of torch"], facts["version of numpy"] = torch.__version__, numpy.__version__
    facts["version of minimegatron"] = minimegatron.__version__
    if run.spec is not None:
        facts["spec"] = " ".join(run.spec)
        facts["source of the spec"] = _source_of(run.spec[0])
    return facts | source_facts()


def source_facts() -> dict[str, str]:
    """{file of this package: digest of its bytes}"""
    package = Path(minimegatron.__file__).parent
    files = (p for p in package.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"))
    return {str(p.relative_to(package.parent)): _digest([p.read_bytes()]) for p in files}


def file_fact(path: str) -> str:
    """Size and digest of a file; of a large one, of blocks at equal distances, the first and the last among them."""
    size = os.path.getsize(path)
    starts = {(size - BLOCK_BYTES) * k // (BLOCKS - 1) for k in range(BLOCKS)} if size > BLOCK_BYTES else {0}
    with open(path, "rb") as file:
        return f"{size} bytes ({_digest(_block(file, start) for start in sorted(starts))})"


def _block(file: Any, start: int) -> bytes:
    file.seek(start)
    return bytes(file.read(BLOCK_BYTES))


def _digest(pieces: Iterable[bytes]) -> str:
    total = hashlib.blake2b(digest_size=6)
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()


def _source_of(module: str) -> str:
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    path = found.origin if found is not None else None
    return _digest([Path(path).read_bytes()]) if path is not None and os.path.isfile(path) else "not found"
