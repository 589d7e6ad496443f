"""What a checkpoint costs: how long a step waits for it, and its CPU-seconds, bytes and bandwidth beside torch's own.

    python -m benchmarks.checkpoint [--megabytes 256] [--pairs 5] [--folder /tmp]

One process holds the state of an AdamW training (weights, main parameters and two moments, a third of them in the 16
bits of the model) and saves it again and again:

| contender | does                                                                                                     |
|-----------|----------------------------------------------------------------------------------------------------------|
| save      | hash, write, fsync, manifest, rename: `checkpoint/save.py`, the step waits for all of it                 |
| stall     | what a step waits for with `--async-save`: the start of a thread, and, where `--passes` seconds of       |
|           | forward and backward are over, what is left of the copy                                                  |
| stock     | `torch.distributed.checkpoint.save` with its own writer, which fsyncs too and hashes nothing             |
| raw       | one file of the same bytes: write, fsync                                                                 |
| load      | every file is hashed while it is read; the same without the hashes; torch's `load`; `readinto`           |
| hash      | the hash of the same bytes in memory: what a save and a load cannot do without                           |

Reads come from the page cache, for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from labkit.paired import Ratio, paired
from minimegatron.checkpoint.commit import Keep, folder_of, read_manifest
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.regions import Logical, Region
from minimegatron.checkpoint.save import AsyncSave, Staging, save
from minimegatron.checkpoint.shard_file import HASH, HASHES, bytes_of
from minimegatron.comm.axis import ALONE


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of a training by name: matrices of 1024 columns, 14 bytes for each parameter."""
    rows, found = megabytes * 1_000_000 // (14 * 1024 * 16), {}
    for layer in range(16):
        weight = torch.randn(rows, 1024)
        found[f"model.layers.{layer}.weight"] = weight.bfloat16()
        for kind in ("fp32_param", "exp_avg", "exp_avg_sq"):
            found[f"optimizer.{kind}.layers.{layer}.weight"] = torch.randn(rows, 1024)
    return found


def logical(tensors: dict[str, torch.Tensor]) -> dict[str, Logical]:
    return {name: Logical(t.shape, [Region(tuple((0, n) for n in t.shape), t)], t.dtype) for name, t in tensors.items()}


class Contenders:
    """Everything that is measured, over the same tensors in the same folder."""

    def __init__(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        self.tensors, self.folder, self.step = tensors, folder, 0
        self.staging = Staging()
        self.bytes = sum(t.nbytes for t in tensors.values())

    def ours(self) -> None:
        self.step += 1
        save(self.folder / "ours", self.step, "run", logical(self.tensors), {}, ALONE, Keep(newest=1))

    def stall(self, passes: float) -> float:
        """Wall seconds that a step waits: for the thread to begin, and later for the copy; the rest is not counted."""
        self.step += 1
        step, copied = self.step, threading.Event()

        def write() -> None:
            tensors = self.staging.copy(logical(self.tensors))
            copied.set()
            save(self.folder / "ours", step, "run", tensors, {}, ALONE, Keep(newest=1))

        begun = time.perf_counter()
        flight = AsyncSave(write, True, step)
        waited = time.perf_counter() - begun
        time.sleep(passes)
        begun = time.perf_counter()
        copied.wait(600)
        waited += time.perf_counter() - begun
        flight.join(600)
        flight.result()
        return waited

    def stock(self) -> None:
        shutil.rmtree(self.folder / "stock", ignore_errors=True)
        dcp.save(dict(self.tensors), checkpoint_id=self.folder / "stock", no_dist=True)

    def raw(self) -> None:
        with (self.folder / "raw").open("wb") as file:
            for tensor in self.tensors.values():
                file.write(bytes_of(tensor))
            file.flush()
            os.fsync(file.fileno())

    def load(self, hashed: bool = True) -> None:
        root = self.folder / "ours"
        manifest = read_manifest(root, self.step)
        files = manifest.files if hashed else ()
        read_tensors(logical(self.tensors), folder_of(root, self.step), manifest, ALONE, files)

    def load_stock(self) -> None:
        dcp.load(dict(self.tensors), checkpoint_id=self.folder / "stock", no_dist=True)

    def hash(self) -> None:
        """The hash of what is in memory."""
        digest = HASHES[HASH]()
        for tensor in self.tensors.values():
            digest.update(bytes_of(tensor))

    def read_raw(self) -> None:
        with (self.folder / "raw").open("rb") as file:
            for tensor in self.tensors.values():
                file.readinto(bytes_of(tensor))


@contextlib.contextmanager
def contenders(megabytes: int, folder: str | None) -> Iterator[Contenders]:
    """In a folder of their own, which is removed."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "ours").mkdir()
    try:
        yield Contenders(state_of(megabytes), place)
    finally:
        shutil.rmtree(place)


def seconds(fn: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    """A run of it, as a cost on that clock."""

    def run() -> float:
        begun = clock()
        fn()
        return clock() - begun

    return run


def spent(fn: Callable[[], object]) -> tuple[float, float, float]:
    """Wall, user and system seconds of a run of it."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    fn()
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--passes", type=float, default=1.0, help="seconds of forward and backward")
    parser.add_argument("--folder", help="on the disk that is to be measured; default that of temporary files")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    wall, cpu = time.perf_counter, time.process_time
    with contenders(args.megabytes, args.folder) as c:
        megabytes = c.bytes / 1e6
        print(f"{len(c.tensors)} tensors, {megabytes:.0f} MB")

        def compare(what: str, one: Callable[[], float], other: Callable[[], float]) -> Ratio:
            ratio = paired(other, one, pairs=args.pairs, warmups=1)
            print(f"{what:<58} {ratio}    {ratio.b:.3f} s against {ratio.a:.3f} s", flush=True)
            return ratio

        compare("stall over save, wall (goal: 0.05)", lambda: c.stall(args.passes), seconds(c.ours, wall))
        compare("save over torch's, CPU-seconds (goal: 1.00)", seconds(c.ours, cpu), seconds(c.stock, cpu))
        compare("save over torch's, wall", seconds(c.ours, wall), seconds(c.stock, wall))
        compare("save over a raw write, wall", seconds(c.ours, wall), seconds(c.raw, wall))
        compare("load over torch's, CPU-seconds", seconds(c.load, cpu), seconds(c.load_stock, cpu))
        compare("load without hashes over torch's, CPU-seconds", seconds(lambda: c.load(False), cpu),
                seconds(c.load_stock, cpu))  # fmt: skip
        compare("load over a raw read, wall", seconds(c.load, wall), seconds(c.read_raw, wall))
        ours, stock = size_of(c.folder / "ours"), size_of(c.folder / "stock")
        print(f"bytes: {ours} against torch's {stock} ({ours / stock:.4f}), the tensors {c.bytes}")
        fns = {"save": c.ours, "torch's save": c.stock, "raw write": c.raw, "hash": c.hash,
               "load": c.load, "torch's load": c.load_stock,
               "load, not hashed": lambda: c.load(False), "raw read": c.read_raw}  # fmt: skip
        for what, fn in fns.items():
            took, user, system = zip(*(spent(fn) for _ in range(args.pairs)), strict=True)
            split = f"{statistics.median(user):.3f} s user, {statistics.median(system):.3f} s system"
            print(f"{what:<20} {megabytes / statistics.median(took):5.0f} MB/s, {split}")


if __name__ == "__main__":
    main()
