"""Arrays that are a pure function of a description, computed once for all ranks and all runs.

The folder's name is the SHA-256 of the description, so whatever the arrays depend on belongs in it: other data, another
seed or another length have another name, and a stale cache cannot be picked up. One process builds, the others wait
(`publish.build_once`). A manifest holds sizes and hashes; a cache that differs from it is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minimegatron.data.publish import build_once, publish, read_json, sha256_of, to_json
from minimegatron.errors import DataError

HASH_BELOW_BYTES = 1 << 30


def cached_arrays(
    folder: str | None, description: Mapping[str, Any], build: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """`build()`, or what an earlier call with the same description saved; memory-mapped and read-only.

    Args:
        folder: where caches live; None computes the arrays in memory.
        description: everything the arrays depend on, JSON-serialisable.
        build: computes the arrays by name.

    Raises:
        DataError: the folder cannot be written to.
        DeadlineError: another process has been building for ten minutes.
    """
    if folder is None:
        return dict(build())
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
    home = os.path.join(folder, key)

    def save(stage: str) -> None:
        files = {}
        for name, array in build().items():
            path = os.path.join(stage, f"{name}.npy")
            np.save(path, array, allow_pickle=False)
            files[name] = {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
        manifest = to_json({"description": dict(description), "files": files})
        publish(os.path.join(stage, "manifest.json"), manifest)

    build_once(home, save, _is_intact)
    names = read_json(os.path.join(home, "manifest.json"))["files"]
    load = {name: np.load(os.path.join(home, f"{name}.npy"), mmap_mode="r", allow_pickle=False) for name in names}
    return {name: array.view(np.ndarray) for name, array in load.items()}


def _is_intact(home: str) -> bool:
    """Whether a cache holds what its manifest says: sizes always, hashes of files below 1 GiB."""
    if not os.path.isdir(home):
        return False
    try:
        for name, entry in read_json(os.path.join(home, "manifest.json"))["files"].items():
            path = os.path.join(home, f"{name}.npy")
            size = os.path.getsize(path)
            if size != entry["bytes"] or (size < HASH_BELOW_BYTES and sha256_of(path) != entry["sha256"]):
                raise DataError("size or SHA-256 differs from the manifest", where=path)
    except (OSError, DataError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the index cache {home} is damaged and built again: {error}", stacklevel=2)
        return False
    return True
