"""A cluster in a dozen numbers: rates of its GPUs and links on the data sheet, and the shares that programs reach.

The problem in a sentence: the time of a step follows from rates, and no program reaches the rates of a data sheet.

| GPU  | sold as | MiB that it has | dense bf16   | memory, bytes/s | NVLink, each way | between nodes, a GPU |
|------|---------|-----------------|--------------|-----------------|------------------|----------------------|
| A100 | 80 GB   | 81,920          | 312 TFLOP/s  | 2.039 T         | 300 G            | 25 G (HDR, 200 Gb/s) |
| H100 | 80 GB   | 81,559          | 989.5        | 3.35 T          | 450 G            | 50 G (NDR, 400 Gb/s) |
| H200 | 141 GB  | 143,771         | 989.5        | 4.8 T           | 450 G            | 50 G                 |
| B200 | 180 GB  | 183,359         | 2250         | 7.7 T           | 900 G            | 50 G                 |

Peaks are those of the data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200; products in FP8 have twice that of
bf16. The memory is the total that nvidia-smi reports in public logs. `reserve`, 4 GiB of it, is assumed for the driver,
CUDA's context, NCCL's buffers and the allocator's fragments. The host's memory is reached over PCIe 4 or 5 and has 16
channels of DDR for eight GPUs.

**Shares** (`..._share`) are the parts of the peaks that products, attention, copies and messages reach: measured
(`planner/measure`), fitted to published runs, or assumed. `CALIBRATED` says which; `tests/planner/test_published.py`
compares predictions with runs that nothing was fitted to. On a CPU each kind of operation has rates of its own
(`operations`).

**Launches.** The host launches one operation after the other, and a GPU that is faster than the host waits: a pass
takes at least `call` seconds for each operation and message (`pass_time`). It is fitted to the runs of arXiv
2312.12391. Without it predictions of 40 steps there are off by 32 % on average (89 % at worst), with it by 9 % (30 %).

**A collective** runs as a ring: its bytes (`trace.Event.wire_bytes`) over the slowest link, and a latency for each of
its N - 1 steps; an all-reduce has the 2 log N steps of a tree. A group with g ranks on each node has g network cards
there, so between nodes its ranks share g times the rate of one card, at most NVLink's rate. Where the nodes hold
different numbers of them, g is the smallest: each ring passes through every node.

The runs that `call` is fitted to: Bang et al. 2023 (arXiv 2312.12391).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.config.fields import Config
from minimegatron.config.fields import described as opt
from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.footprint.events import Operation, require_known
from minimegatron.trace import Event
from minimegatron.training.flops import peak_tflops

NOTHING = 1e-30  # seconds
MIB, GIB, CALL = 2**20, 2**30, 4e-5
_FLASH = "flash_share: cuDNN on an H100 in arXiv 2407.08608, 518 TFLOP/s forward and 499 backward"
_CALL = "call: 40 of the 1,440 steps on up to 8 A100 that arXiv 2312.12391 measured"
_LIKE = f"assumed: shares as the H100's, links as the A100's; {_FLASH}; {_CALL}, no other GPU's host"
CALIBRATED = {
    "A100": "matmul_share and copy_share: the 22B and 1T rows of table 5 of arXiv 2205.05198; flash_share: arXiv "
    f"2307.08691; {_CALL}",
    "H100": "copy_share and matmul_share: the 1.7B and 16B rows of Megatron-LM's README of July 2024, which count the "
    f"full square of attention; links are assumed; {_FLASH}; {_CALL}, no H100's host",
    "H200": _LIKE,
    "B200": _LIKE,
}


@dataclasses.dataclass(frozen=True)
class Cluster(Config):
    """The GPUs (or CPUs) and links that a plan computes with."""

    gpu: str = opt("GPU", "name")
    gpus_per_node: int = opt(8, "GPUs that the fast link joins", least=1)
    memory: float = opt(81920.0 * MIB, "bytes of a GPU, all that nvidia-smi reports", above=0.0)
    reserve: float = opt(4.0 * GIB, "bytes of them that are no tensor's: driver, CUDA, NCCL, fragments", least=0.0)
    matmul: float = opt(312e12, "peak of dense products in the model's dtype, FLOP/s", above=0.0)
    copy: float = opt(2e12, "peak of memory, bytes/s read and written", above=0.0)
    inside: float = opt(300e9, "of the link inside a node, bytes/s a GPU sends", above=0.0)
    between: float = opt(25e9, "of the network between nodes, bytes/s a GPU sends", above=0.0)
    latency_inside: float = opt(4e-6, "seconds of a step of a collective inside a node", least=0.0)
    latency_between: float = opt(1e-5, "seconds of a step between nodes", least=0.0)
    matmul_share: float = opt(0.97, "of the peak that large products reach, reading and writing apart", above=0.0)
    flash_share: float = opt(0.5, "of the peak that attention reaches, and products of many narrow matrices", above=0.0)
    copy_share: float = opt(0.64, "of the peak that large copies reach", above=0.0)
    link_share: float = opt(0.80, "of the peak that large messages reach", above=0.0)
    call: float = opt(0.0, "seconds in which the host asks for one operation or message; 0: none waits", least=0.0)
    fp8: float = opt(0.0, "peak of dense FP8 products, FLOP/s; 0: there are none", least=0.0)
    bus: float = opt(0.0, "to the memory of the host, bytes/s a GPU sends; 0: not known", least=0.0)
    host: float = opt(0.0, "memory of the host, bytes/s read and written for a GPU; 0: not known", least=0.0)
    price: float = opt(0.0, "of a GPU for an hour, in any currency", least=0.0)
    device: str = opt("cuda", "type of a rank's device", ("cuda", "cpu"))
    overlaps: bool = opt(True, "links carry while a rank computes; not where its own processor carries")
    operations: dict | None = opt(None, "{operation: seconds of a call, of a FLOP, of a byte}, each measured by itself")

    @property
    def usable(self) -> float:
        """Bytes of a GPU that are free for tensors."""
        return self.memory - self.reserve

    def operation(self, operation: Operation, kind: str = "") -> float:
        """Seconds of one operation; `kind` is the kind of operation under which `planner/measure` has measured it, or
        "".

        The time of a product is the sum of its compute time and its memory time: reads overlap with compute only in
        part.

        Raises:
            Unpredicted: a product in FP8 on a GPU without FP8.
        """
        if (seconds := self.measured(kind)) is not None:
            return seconds[0] + operation.flops * seconds[1] + operation.nbytes * seconds[2]
        if not operation.flops:
            return self.moved(operation.nbytes)
        require_known(operation.unit != "fp8" or self.fp8 > 0, f"FP8 products of {self.gpu}")
        share = self.flash_share if operation.unit == "attention" else self.matmul_share
        peak = self.fp8 if operation.unit == "fp8" else self.matmul
        return operation.flops / (peak * share) + self.moved(operation.nbytes)

    def moved(self, nbytes: float) -> float:
        """Seconds to read and write so many bytes of memory."""
        return nbytes / (self.copy * self.copy_share)

    def measured(self, operation: str) -> tuple[float, float, float] | None:
        """Seconds of a call, of a FLOP and of a byte of this kind of operation; None where it was not measured."""
        found = (self.operations or {}).get(operation)
        return None if found is None else (found[0], max(found[1], NOTHING), max(found[2], NOTHING))

    def of(self, operation: str) -> Cluster:
        """The cluster with the rates that this kind of operation reaches."""
        if (seconds := self.measured(operation)) is None:
            return self
        _, flop, byte = seconds
        products, copies = 1 / (flop * self.matmul), 1 / (byte * self.copy)
        return dataclasses.replace(self, matmul_share=products, flash_share=products, copy_share=copies)

    def collective(self, name: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective over these global ranks; `name` and `nbytes` as `trace` counts them."""
        size = len(ranks)
        if size == 1:
            return 0.0
        sent = Event(name, "comm", 0, 0.0, 0.0, nbytes=1, size=size).wire_bytes * nbytes
        rate = self.exchange_rate(ranks) if name == "all_to_all" else self.rate(ranks)
        step, _, byte = self.measured(name) or (self.latency(ranks), 0.0, 1 / rate)
        return sent * byte + self.steps(name, size) * step

    @staticmethod
    def steps(name: str, size: int) -> int:
        """Steps of a collective that follow one another."""
        if name in ("send", "ring_shift"):
            return 1
        return 2 * (size - 1).bit_length() if name == "all_reduce" else size - 1

    def message(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a message from one of these ranks to the next."""
        rates = self.latency(ranks), 0.0, 1 / (self._slowest(ranks, 1) * self.link_share)
        step, _, byte = self.measured("ring_shift") or rates
        return nbytes * byte + step

    def rate(self, ranks: Sequence[int]) -> float:
        """Bytes/s that each rank of a group sends in a ring."""
        return self._slowest(ranks, self._together(ranks)) * self.link_share

    def exchange_rate(self, ranks: Sequence[int]) -> float:
        """Bytes/s that each rank sends in an all-to-all: rows for other nodes leave through the rank's own network
        card."""
        others, far = len(ranks) - 1, len(ranks) - self._together(ranks)
        return min(self.rate(ranks), self.between * self.link_share * others / far) if far else self.rate(ranks)

    def latency(self, ranks: Sequence[int]) -> float:
        return self.latency_inside if self._together(ranks) == len(ranks) else self.latency_between

    def _together(self, ranks: Sequence[int]) -> int:
        """How many of the ranks are on one node, on that with the fewest."""
        return _fewest_on_a_node(tuple(ranks), self.gpus_per_node)

    def _slowest(self, ranks: Sequence[int], cards: int) -> float:
        return self.inside if self._together(ranks) == len(ranks) else min(self.inside, self.between * cards)


@functools.cache
def _fewest_on_a_node(ranks: tuple[int, ...], gpus_per_node: int) -> int:
    return min(Counter(rank // gpus_per_node for rank in ranks).values())


def _given(gpu: str, mebibytes: int, copy: float, inside: float, between: float, **more: Any) -> Cluster:
    peak = peak_tflops(gpu)
    assert peak is not None, "a GPU of the table"
    return Cluster(
        gpu=gpu, memory=float(mebibytes * MIB), matmul=peak * 1e12, copy=copy, inside=inside, between=between,
        call=CALL, **more,
    )  # fmt: skip


_HOPPER = {"matmul_share": 1.0, "copy_share": 0.265, "bus": 64e9, "host": 77e9}
CLUSTERS = {
    "a100": _given("A100", 81_920, 2.039e12, 300e9, 25e9, copy_share=0.63, flash_share=0.55, bus=32e9, host=51e9),
    "h100": _given("H100", 81_559, 3.35e12, 450e9, 50e9, fp8=1979e12, **_HOPPER),
    "h200": _given("H200", 143_771, 4.8e12, 450e9, 50e9, fp8=1979e12, **_HOPPER),
    "b200": _given("B200", 183_359, 7.7e12, 900e9, 50e9, fp8=4500e12, **_HOPPER),
}


def read_cluster(name: str) -> Cluster:
    """Read a preset by its name, or a JSON file with the fields of `Cluster`.

    Raises:
        ConfigError: there is no such preset or file; the file has a field that does not exist, or an impossible value.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not name.endswith(".json"):
        near = did_you_mean(name, CLUSTERS) or f"choose among {', '.join(CLUSTERS)}, or give a FILE.json"
        raise ConfigError(f"there is no cluster {name!r}", fix=near)
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {error}", fix="minimegatron plan --measure FILE.json writes one") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}", fix="a JSON table of the fields of Cluster")
    return Cluster.from_dict(found)


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write the file that `read_cluster` reads."""
    path.write_text(json.dumps(cluster.to_dict(), indent=2) + "\n", encoding="utf-8")
