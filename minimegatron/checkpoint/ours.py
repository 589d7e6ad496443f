"""The weights of a checkpoint as a `Source`, and a `Source` of weights written as a checkpoint.

A converter wants whole tensors, and a checkpoint has regions that some layout has left. Reading puts a box together
from the regions that meet it, after the files have been verified. Writing stores every matrix as one region; of a stack
of experts each matrix is a region, so that no more than one is in memory. With weights alone the manifest has no
counters: a run that loads it begins at step 0 with a new optimizer, as if `--finetune` were given.

    folder/
      iter_0000000/      manifest.json, shard-00000-of-00003.safetensors, ...
      huggingface/       config.json, tokenizer and the like, for the way back (`checkpoint/companions`)
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minimegatron.checkpoint.commit import choose, complete, folder_of, verify
from minimegatron.checkpoint.companions import FOLDER, keep
from minimegatron.checkpoint.companions import files_in as companion_files
from minimegatron.checkpoint.disk import files_in, staged, write_bytes
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.checkpoint.manifest import NAME, Manifest, Stored, StoredTensor, key_of
from minimegatron.checkpoint.packed import BASE
from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.save import file_name
from minimegatron.checkpoint.shard_file import NAMES
from minimegatron.checkpoint.sources import Described, Source, Together, in_files, matrices, write_file
from minimegatron.config import TransformerConfig

_PREFIX = "model."
SCALES = (".amax_history", ".scale")  # of FP8: how a run computes, no weights


class Continued(NamedTuple):
    """The state with which a run goes on, beside its weights.

    Attributes:
        step: iterations that were trained.
        tensors: (prefix of names, source) pairs.
        state: `state` of the manifest (`training/run_state.RunState.values`).
    """

    step: int
    tensors: dict[str, Source]
    state: dict[str, Any]


def _chosen(root: Path, step: int | None) -> Path:
    return folder_of(root, choose(root, [*complete(root)], step, "complete checkpoint"))


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
        step: step; default the newest complete one.

    Attributes:
        config: configuration of the model.
        optimizer_state: a description of its optimizer state, for a message; empty for none.
        companions_hash: hash of the files beside its weights.
        base_contents: hash of the files of its `lora_base`.

    Raises:
        CheckpointError: there is none, or it is not what was written.
    """

    def __init__(self, root: Path, step: int | None = None) -> None:
        self.folder = _chosen(root, step)
        manifest = Manifest.read(self.folder)
        self.config = TransformerConfig.from_dict(manifest.state["model"])
        self._files = CheckpointFiles(self.folder, manifest)
        names = [name for name in manifest.tensors if name.startswith(_PREFIX) and not name.endswith(SCALES)]
        self.tensors = {name.removeprefix(_PREFIX): self._files.tensors[name] for name in names}
        moments = sum(name.startswith("optimizer.") for name in manifest.tensors)
        self.optimizer_state = f"the state of an optimizer ({moments} tensors)" if moments else ""
        self.companions_hash: str | None = manifest.state.get(FOLDER)
        self.base_contents: str | None = manifest.state.get("run", {}).get(BASE)
        verify(self.folder, manifest, sorted({r.file for name in names for r in manifest.tensors[name].regions}))

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self._files.read(_PREFIX + name, box)


def write_checkpoint(
    source: Source,
    config: TransformerConfig,
    root: Path,
    max_shard_size: int,
    companions: Path | None = None,
    run: Continued | None = None,
) -> list[str]:
    """Write a checkpoint of weights, of step 0; or of a run that goes on.

    Args:
        source: weights under our names.
        config: configuration of the model.
        root: must not exist.
        max_shard_size: bytes of a file.
        companions: folder with the files beside its weights.
        run: the state with which the run goes on.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the folder exists.
    """
    with staged(root) as hidden:
        run = run or Continued(0, {}, {})
        if companions is not None:
            run = run._replace(state={**run.state, FOLDER: keep(hidden, companion_files(companions))})
        _write(Together({_PREFIX: source, **run.tensors}), config, folder_of(hidden, run.step), max_shard_size, run)
    return files_in(root)


def _write(source: Source, config: TransformerConfig, folder: Path, max_shard_size: int, run: Continued) -> None:
    folder.mkdir()
    boxes = {key_of(n, box): (n, box) for n, (_, shape) in source.tensors.items() for box in matrices(shape)}
    sizes = {
        key: Described(source.tensors[name].dtype, tuple(b - a for a, b in box)) for key, (name, box) in boxes.items()
    }
    run_id, groups = secrets.token_hex(8), in_files(sizes, max_shard_size)
    header = {"step": str(run.step), "run_id": run_id}
    files: dict[str, tuple[int, str]] = {}
    regions: dict[str, list[Stored]] = {name: [] for name in source.tensors}

    def read(key: str) -> torch.Tensor:
        return source.read(*boxes[key])

    for i, group in enumerate(groups):
        file = file_name(i, len(groups))
        files[file] = write_file(folder / file, group, header, read)
        for name, box in map(boxes.__getitem__, group):
            regions[name].append(Stored.of(name, box, file))
    tensors = {
        name: StoredTensor(NAMES[dtype], shape, tuple(regions[name])) for name, (dtype, shape) in source.tensors.items()
    }
    text = Manifest(run.step, run_id, files, tensors, {**run.state, "model": config.to_dict(), "layout": {}}).dumps()
    write_bytes(folder / NAME, text)
