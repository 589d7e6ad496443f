"""A checkpoint of ours as a source of weights, and a source of weights as a checkpoint of ours.

The problem in a sentence: a checkpoint is made of regions that some layout has left behind, and a converter wants
tensors; a converter has tensors, and a run of any layout wants regions.

Reading puts a box together from the stored regions that meet it, each from its file, after the files have been held
against the manifest. Writing stores every matrix as one region (of a stack of experts each by itself, so that no more
than one is in memory). Where there are weights only, the manifest has no counters: a run that loads it begins at step
0, with a new optimizer, as if `--finetune` were given.

    folder/
      iter_0000000/      manifest.json, shard-00000-of-00003.safetensors, ...
      huggingface/       what the model has beside its weights, for the way back (`checkpoint/origin`)
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minimegatron.checkpoint.commit import complete, folder_of, verify
from minimegatron.checkpoint.disk import write_durable
from minimegatron.checkpoint.folder import in_files
from minimegatron.checkpoint.manifest import NAME, Manifest, Stored, StoredTensor
from minimegatron.checkpoint.origin import FOLDER, keep
from minimegatron.checkpoint.origin import files_in as beside_weights
from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.shard_file import DTYPES, Entry, read_header, write_shard
from minimegatron.checkpoint.sources import Described, Source, Together, intersection, read_box, whole
from minimegatron.checkpoint.staged import files_in, staged
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError

_PREFIX = "model."
SCALES = (".amax_history", ".scale")  # of FP8: how a run computes, no weights
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Continued(NamedTuple):
    """What a run goes on with, besides its weights.

    Attributes:
        step: iterations that were trained.
        tensors: what belongs before the names of each source, and the source.
        state: of the manifest (`training/run_state.RunState.values`).
    """

    step: int
    tensors: dict[str, Source]
    state: dict[str, Any]


def _chosen(root: Path, step: int | None) -> Path:
    steps = list(complete(root))
    if not steps or (step is not None and step not in steps):
        fix = f"choose among {', '.join(map(str, steps))}" if steps else "give the folder that --save named"
        what = "no complete checkpoint" + (f" of step {step}" if steps else "")
        raise CheckpointError(what, where=str(root), fix=fix)
    return folder_of(root, steps[-1] if step is None else step)


def config_of(root: Path, step: int | None = None) -> TransformerConfig:
    """The model of a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    return TransformerConfig.from_dict(Manifest.read(_chosen(root, step)).state["model"])


class Checkpoint:
    """The weights of a checkpoint of ours, by logical name.

    Args:
        root: folder with `iter_0000020` and the like.
        step: which; default the newest complete one.

    Attributes:
        config: of the model.
        beside: what is there of an optimizer, in words.
        given: hash of the folder with what the model has beside its weights.

    Raises:
        CheckpointError: there is none, or it is not what was written.
    """

    def __init__(self, root: Path, step: int | None = None) -> None:
        self.folder = _chosen(root, step)
        manifest = Manifest.read(self.folder)
        self.config = TransformerConfig.from_dict(manifest.state["model"])
        self._stored = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in manifest.tensors.items()
            if name.startswith(_PREFIX) and not name.endswith(SCALES)
        }
        self.tensors = {name: Described(DTYPES[t.dtype], t.shape) for name, t in self._stored.items()}
        moments = sum(name.startswith("optimizer.") for name in manifest.tensors)
        self.beside = f"the state of an optimizer ({moments} tensors)" if moments else ""
        self.given: str | None = manifest.state.get(FOLDER)
        files = sorted({region.file for tensor in self._stored.values() for region in tensor.regions})
        verify(self.folder, manifest, files)
        self._entries: dict[str, dict[str, Entry]] = {file: read_header(self.folder / file)[0] for file in files}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        dtype, shape = self.tensors[name]
        box = whole(shape) if box is None else box
        made = None
        for region in self._stored[name].regions:
            met = intersection([(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True)], box)
            if met is None:
                continue
            entry = self._entries[region.file].get(region.key)
            if entry is None or entry.shape != region.sizes:
                raise CheckpointError(f"does not hold {region.key}", where=str(self.folder / region.file))
            inner = tuple((a - o, b - o) for (a, b), o in zip(met, region.offsets, strict=True))
            part = read_box(self.folder / region.file, entry, inner)
            if met == list(box):
                return part
            if made is None:
                made = torch.empty([b - a for a, b in box], dtype=dtype)
            made[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(met, box, strict=True))] = part
        assert made is not None, "the manifest's regions fill their tensors"
        return made


def write_checkpoint(
    source: Source,
    config: TransformerConfig,
    root: Path,
    max_shard_size: int,
    origin: Path | None = None,
    run: Continued | None = None,
) -> list[str]:
    """Write a checkpoint of weights, of step 0; or of a run that goes on.

    Args:
        source: weights under our names.
        config: of the model.
        root: which is not there yet.
        max_shard_size: bytes of a file.
        origin: folder with what the model has beside its weights.
        run: what goes on.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the folder is there.
    """
    with staged(root) as hidden:
        run = run or Continued(0, {}, {})
        if origin is not None:
            run = run._replace(state={**run.state, FOLDER: keep(hidden, beside_weights(origin))})
        _write(Together({_PREFIX: source, **run.tensors}), config, folder_of(hidden, run.step), max_shard_size, run)
    return files_in(root)


def _write(source: Source, config: TransformerConfig, folder: Path, max_shard_size: int, run: Continued) -> None:
    folder.mkdir()
    boxes = {f"{name}@{'_'.join(str(a) for a, _ in box)}": (name, box) for name, box in _regions(source)}
    sizes = {
        key: Described(source.tensors[name].dtype, tuple(b - a for a, b in box)) for key, (name, box) in boxes.items()
    }
    run_id, groups = secrets.token_hex(8), list(in_files(sizes.items(), max_shard_size))
    header = {"step": str(run.step), "run_id": run_id}
    files: dict[str, tuple[int, str]] = {}
    regions: dict[str, list[Stored]] = {name: [] for name in source.tensors}

    def read(key: str) -> torch.Tensor:
        return source.read(*boxes[key])

    for i, group in enumerate(groups):
        file = f"shard-{i:05d}-of-{len(groups):05d}.safetensors"
        described = dict(group)
        files[file] = write_durable(
            folder / file,
            sum(one.nbytes for one in described.values()),
            lambda out, of=described: write_shard(out, of, header, read),  # type: ignore[misc]
        )
        for key, (_, shape) in group:
            name, box = boxes[key]
            regions[name].append(Stored(tuple(a for a, _ in box), shape, file, key))
    tensors = {
        name: StoredTensor(_DTYPE_NAMES[dtype], shape, tuple(regions[name]))
        for name, (dtype, shape) in source.tensors.items()
    }
    text = Manifest(run.step, run_id, files, tensors, {**run.state, "model": config.to_dict(), "layout": {}}).dumps()
    write_durable(folder / NAME, len(text), lambda out: out.write(text))


def _regions(source: Source) -> list[tuple[str, Box]]:
    """Every tensor whole, of a stack each matrix by itself."""
    found: list[tuple[str, Box]] = []
    for name, (_, shape) in source.tensors.items():
        if len(shape) == 3:
            found += [(name, ((e, e + 1), *whole(shape[1:]))) for e in range(shape[0])]
        else:
            found.append((name, whole(shape)))
    return found
