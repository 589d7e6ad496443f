"""The manifest of a checkpoint: one JSON file that names every other file, tensor and region, and its own hash.

    iter_0000020/
      manifest.json                          read first; what it does not name is not part of the checkpoint
      shard-00000-of-00004.safetensors       the regions that rank 0 has written
      ...

| field     | holds                                                                                                 |
|-----------|-------------------------------------------------------------------------------------------------------|
| `version` | of this format: 2, or 1; another one is refused                                                       |
| `step`, `run_id` | also in the header of every shard, so that a shard of another save is recognised               |
| `files`   | name -> bytes and hash: `xxh3_128:` and its digits; in version 1 the digits of SHA-256                |
| `tensors` | logical name -> dtype, shape, and regions: offsets, sizes, file, key in the file                      |
| `state`   | counters, schedule, loss scale, configuration: everything that is not a tensor                        |
| `sha256`  | of all the rest                                                                                       |

The text must be, byte for byte, what `dumps` makes of its contents. Names, regions and sizes are checked before they
are used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.shard_file import DTYPES, HASHES, MAX_DIMS, MAX_TENSORS, kind_of
from minimegatron.errors import CheckpointError

NAME, VERSION, MAX_BYTES = "manifest.json", 2, 256 << 20
READS = (1, 2)  # versions
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A region of a tensor, and its place.

    Attributes:
        offsets, sizes: in each dim of the logical tensor.
        file: name in the folder.
        key: name of the tensor in the file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    @classmethod
    def of(cls, name: str, box: Box, file: str) -> Stored:
        """The region `box` of a tensor in a file."""
        return cls(tuple(a for a, _ in box), tuple(b - a for a, b in box), file, key_of(name, box))

    @property
    def box(self) -> Box:
        return tuple((o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


def key_of(name: str, box: Box) -> str:
    """The name of this region of a tensor in a file."""
    return f"{name}@{'_'.join(str(start) for start, _ in box)}"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A logical tensor: its dtype by the name that safetensors has for it, its shape, its regions."""

    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Stored, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a manifest, as in the module docstring."""

    step: int
    run_id: str
    files: dict[str, tuple[int, str]]
    tensors: dict[str, StoredTensor]
    state: dict[str, Any]

    def dumps(self) -> bytes:
        """The file's text.

        Raises:
            CheckpointError: a region is missing, or there twice.
        """
        try:
            _check(self)
        except _Bad as error:
            raise CheckpointError(f"the manifest {error}", where=f"step {self.step}", fix="report this") from None
        tensors = {
            name: [t.dtype, t.shape, [[r.offsets, r.sizes, r.file, r.key] for r in t.regions]]
            for name, t in self.tensors.items()
        }
        body = {
            "version": VERSION,
            "step": self.step,
            "run_id": self.run_id,
            "files": self.files,
            "tensors": tensors,
            "state": self.state,
        }
        return _text({**body, "sha256": hashlib.sha256(_text(body)).hexdigest()})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint's folder.

        Raises:
            CheckpointError: it is missing, changed, of another version, or contradicts itself.
        """
        path = folder / NAME
        try:
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(
                    "there is no manifest: this is no complete checkpoint",
                    where=str(path),
                    fix="`minimegatron checkpoint inspect` lists the complete ones of a folder",
                )
            if path.stat().st_size > MAX_BYTES:
                raise _Bad(f"is larger than {MAX_BYTES >> 20} MiB")
            return _parse(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"the manifest cannot be read: {error.strerror}", where=str(path)) from error
        except _Bad as error:
            raise CheckpointError(
                f"the manifest {error}", where=str(path), fix="load an older checkpoint, or another copy of this one"
            ) from None


class _Bad(ValueError):
    pass


def _text(body: Any) -> bytes:
    return (json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _parse(text: bytes) -> Manifest:
    try:
        body = json.loads(text)
        stated_hash = body.pop("sha256")
        actual_hash = hashlib.sha256(_text(body)).hexdigest()
        same = stated_hash == actual_hash and _text({**body, "sha256": actual_hash}) == text
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        same = False
    if not same:
        raise _Bad("is not what was written: its contents do not have the hash that it names")
    if body.get("version") not in READS:
        raise _Bad(f"is of format {body.get('version')}, this version reads {' and '.join(map(str, READS))}")
    try:
        tensors = {
            name: StoredTensor(dtype, tuple(shape), tuple(Stored(tuple(o), tuple(s), f, k) for o, s, f, k in stored))
            for name, (dtype, shape, stored) in body["tensors"].items()
        }
        files = {name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
        manifest = Manifest(int(body["step"]), str(body["run_id"]), files, tensors, dict(body["state"]))
        _check(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise _Bad(f"lacks something: {str(error)[:80]}") from None
    except ValueError as error:
        raise _Bad(str(error)[:200]) from None
    return manifest


def _check(manifest: Manifest) -> None:
    """Check that file names stay in the folder, and that regions are inside their tensors and fill them."""
    for name, (_, stated) in manifest.files.items():
        if kind_of(stated) not in HASHES:
            raise _Bad(f"gives {name[:80]!r} a hash of the unknown kind {kind_of(stated)[:20]!r}")
        if not _FILE.fullmatch(name) or name == NAME:
            raise _Bad(f"names the file {name[:80]!r}, which cannot be one of a checkpoint")
    if len(manifest.tensors) > MAX_TENSORS:
        raise _Bad(f"lists {len(manifest.tensors)} tensors; the limit is {MAX_TENSORS}")
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES or len(tensor.shape) > MAX_DIMS:
            raise _Bad(f"gives {name[:80]!r} dtype {tensor.dtype!r} and {len(tensor.shape)} dims")
        for region in tensor.regions:
            ends = zip(region.offsets, region.sizes, tensor.shape, strict=False)
            fits = len(region.offsets) == len(region.sizes) == len(tensor.shape)
            if not fits or any(o < 0 or n < 0 or o + n > whole for o, n, whole in ends):
                raise _Bad(f"has a region of {name[:80]!r} that is not inside it")
            if region.file not in manifest.files:
                raise _Bad(f"has a region of {name[:80]!r} in a file that it does not list: {region.file[:80]!r}")
        elements = sum(math.prod(r.sizes) for r in tensor.regions)
        if elements != math.prod(tensor.shape):
            raise _Bad(f"has {elements} of the {math.prod(tensor.shape)} elements of {name[:80]!r}")
        if _overlap(tensor.regions):
            raise _Bad(f"has some elements of {name[:80]!r} twice")


def _overlap(regions: tuple[Stored, ...]) -> bool:
    """Whether two regions share an element: only those that begin before another ends in dim 0 are compared."""
    if not regions or not regions[0].sizes:
        return len(regions) > 1
    open_: list[Stored] = []
    for one in sorted((r for r in regions if math.prod(r.sizes)), key=lambda r: r.offsets):
        open_ = [r for r in open_ if r.offsets[0] + r.sizes[0] > one.offsets[0]]
        if any(all(_meet(*dim) for dim in zip(r.offsets, r.sizes, one.offsets, one.sizes, strict=True)) for r in open_):
            return True
        open_.append(one)
    return False


def _meet(a: int, na: int, b: int, nb: int) -> bool:
    return a < b + nb and b < a + na
