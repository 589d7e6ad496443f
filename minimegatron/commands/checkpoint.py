"""`minimegatron checkpoint`: what a checkpoint holds, whether it is whole, how two of them differ.

    minimegatron checkpoint inspect runs/a                  all of a folder, and the newest in full
    minimegatron checkpoint inspect runs/a/iter_0000020 --tensors
    minimegatron checkpoint verify runs/a                   every file against its SHA-256
    minimegatron checkpoint diff runs/a runs/b --step 20    tensors that differ, and by how much

A folder is either one checkpoint (`iter_0000020`) or one that holds some; then `--step N` chooses,
and the newest is the default. Nothing is executed, nothing is written, and one tensor at a time is
in memory. A tensor is compared by its bits; the largest difference is that of its numbers.

| exit status | when                                                              |
|-------------|-------------------------------------------------------------------|
| 0           | it is whole; they are equal                                       |
| 1           | `diff`: they differ                                               |
| 2           | a mistake on the command line                                     |
| 3           | a file is missing, damaged or foreign; the message names it       |
"""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from minimegatron.checkpoint.commit import choose, folder_of, published, read_manifest, verify, verify_names
from minimegatron.checkpoint.companions import FOLDER, verified
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.checkpoint.manifest import VERSION, Manifest
from minimegatron.checkpoint.shard_file import DTYPES
from minimegatron.errors import CheckpointError
from minimegatron.flags import Parser

USAGE = "minimegatron checkpoint inspect|verify|diff FOLDER ... [--step N]"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="minimegatron checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", metavar="inspect|verify|diff", required=True)
    for action, text in (
        ("inspect", "step, run, configuration, tensors"),
        ("verify", "hold every file against its SHA-256"),
        ("diff", "tensors that differ between two checkpoints, and by how much"),
    ):
        one = actions.add_parser(action, help=text, description=text)
        one.add_argument("folder", type=Path, help="a checkpoint, or a folder that holds some")
        if action == "diff":
            one.add_argument("other", type=Path, help="the other one")
        one.add_argument("--step", type=int, help="which checkpoint of the folder; default the newest")
        if action != "verify":
            only = "only tensors whose name begins with it: model., optimizer.exp_avg., rng."
            one.add_argument("--prefix", default="", help=only)
        if action == "inspect":
            one.add_argument("--tensors", action="store_true", help="a line for each tensor")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect, verify or diff.

    Raises:
        CheckpointError: a folder is no checkpoint, or is damaged.
    """
    chosen = build_parser().parse_args(argv)
    steps = [] if _is_checkpoint(chosen.folder) else published(chosen.folder)
    if chosen.action == "diff":
        return _diff(_folder(chosen.folder, chosen.step), _folder(chosen.other, chosen.step), chosen.prefix)
    if chosen.action == "verify":
        wanted = steps if steps and chosen.step is None else [chosen.step]
        return _verify([_folder(chosen.folder, step) for step in wanted])
    if steps and chosen.step is None:
        _list(chosen.folder, steps)
    _inspect(_folder(chosen.folder, chosen.step), chosen.prefix, chosen.tensors)
    return 0


def _is_checkpoint(folder: Path) -> bool:
    return re.fullmatch(r"iter_\d{7,}", folder.name) is not None


def _folder(folder: Path, step: int | None) -> Path:
    """The folder of the checkpoint that is asked for."""
    if _is_checkpoint(folder):
        return folder
    return folder_of(folder, choose(folder, published(folder), step))


def _manifest(folder: Path) -> Manifest:
    if not _is_checkpoint(folder):
        raise CheckpointError("no checkpoint", where=str(folder), fix="its folder is named iter_ and the step")
    return read_manifest(folder.parent, int(folder.name.removeprefix("iter_")))


def _list(root: Path, steps: Iterable[int]) -> None:
    """A line for each checkpoint of a folder."""
    print(f"{'step':>10}  {'MB':>10}  {'ranks':>5}  {'validation loss':>15}  run")
    for step in steps:
        try:
            m = _manifest(folder_of(root, step))
        except CheckpointError as error:
            print(f"{step:>10}  damaged: {error.what}")
            continue
        loss = m.state.get("validation_loss")
        size = sum(length for length, _ in m.files.values()) / 1e6
        ranks = m.state.get("layout", {}).get("world", "")
        print(f"{step:>10}  {size:>10.1f}  {ranks:>5}  {'' if loss is None else f'{loss:.6f}':>15}  {m.run_id}")
    print()


def _inspect(folder: Path, prefix: str, tensors: bool) -> None:
    manifest = _manifest(folder)
    print(f"{folder}: step {manifest.step} of run {manifest.run_id}, format {VERSION}")
    for section, values in manifest.state.items():
        given = values.items() if isinstance(values, dict) else [("", values)]
        words = ", ".join(f"{k} {v}".strip() for k, v in given if v not in (None, False, "", [], ()))
        if words:
            print(textwrap.fill(f"{section}: {words}", 118, subsequent_indent="    ", break_on_hyphens=False))
    groups: dict[str, list[int]] = {}
    for name, tensor in manifest.tensors.items():
        total = groups.setdefault(_group(name), [0, 0, 0])
        numbers = math.prod(tensor.shape)
        for i, more in enumerate((1, numbers, numbers * DTYPES[tensor.dtype].itemsize)):
            total[i] += more
    print(f"\n{'part':<24}{'tensors':>9}{'numbers':>16}{'MB':>12}")
    for group, (count, numbers, size) in sorted(groups.items()):
        print(f"{group:<24}{count:>9}{numbers:>16,}{size / 1e6:>12.1f}")
    if tensors:
        print(f"\n{'dtype':<8}{'shape':<20}{'regions':>8}{'files':>6}  tensor")
        for name, t in sorted(manifest.tensors.items()):
            if name.startswith(prefix):
                shape, files = "×".join(map(str, t.shape)) or "scalar", {r.file for r in t.regions}
                print(f"{t.dtype:<8}{shape:<20}{len(t.regions):>8}{len(files):>6}  {name}")


def _group(name: str) -> str:
    """`optimizer.exp_avg` of `optimizer.exp_avg.decoder...`; `model`, `rng`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0]


def _verify(folders: Iterable[Path]) -> int:
    """Compare all of them with their manifests; the first that is damaged is raised at the end."""
    first = None
    for folder in folders:
        try:
            manifest = _manifest(folder)
            verify_names(folder, manifest)
            verify(folder, manifest)
            verified(folder.parent / FOLDER, manifest.state.get(FOLDER))
            print(f"{folder}: whole, {len(manifest.files)} files, {len(manifest.tensors)} tensors")
        except CheckpointError as error:
            print(f"{folder}: damaged: {error.what}")
            first = first or error
    if first is not None:
        raise first
    return 0


def _diff(one: Path, other: Path, prefix: str) -> int:
    """Print the differences; 1 if there are any."""
    readers = [CheckpointFiles(folder, _manifest(folder)) for folder in (one, other)]
    for reader in readers:
        verify(reader.folder, reader.manifest)
    a, b = ({n: t for n, t in r.manifest.tensors.items() if n.startswith(prefix)} for r in readers)
    lines = [f"only in {one}: {name}" for name in sorted(a.keys() - b.keys())]
    lines += [f"only in {other}: {name}" for name in sorted(b.keys() - a.keys())]
    both = sorted(a.keys() & b.keys())
    for name in both:
        if (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape):
            lines.append(f"{name}: {a[name].dtype} {a[name].shape} and {b[name].dtype} {b[name].shape}")
            continue
        x, y = (reader.read(name) for reader in readers)
        if not torch.equal(_bits(x), _bits(y)):
            gaps = (x.double() - y.double()).abs()
            far = f"{gaps.max():.6g} in {int((gaps != 0).sum())}"
            lines.append(f"{name}: largest difference {far} of {x.numel()} numbers; they are up to {x.abs().max():.6g}")
    sections = readers[0].manifest.state.keys() | readers[1].manifest.state.keys()
    for section in sorted(sections):
        now, then = (r.manifest.state.get(section) for r in readers)
        if now != then and isinstance(now, dict) and isinstance(then, dict):
            keys = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))
            lines += [f"{section}.{k}: {now.get(k)} and {then.get(k)}" for k in keys]
        elif now != then:
            lines.append(f"{section}: {now} and {then}")
    print("\n".join(lines) if lines else f"equal: {len(both)} tensors, to the bit, and all that is no tensor")
    return 1 if lines else 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
