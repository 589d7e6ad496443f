"""The backend and the GPU of each rank, and why a GPU of the machine cannot be used.

The problem in a sentence: torch without a usable GPU computes on the CPU and says nothing, so a driver that is too old
for torch's build costs a factor of a hundred without a message.

All ranks report what they see (`look`), and each draws the same conclusion from the same facts (`choose`):

| what the ranks see                                        | backend None             | "nccl"  | "gloo"          |
|-----------------------------------------------------------|--------------------------|---------|-----------------|
| a GPU of its own for each rank                            | NCCL                     | NCCL    | gloo on the CPU |
| no GPU on any machine, or `CUDA_VISIBLE_DEVICES` is empty | gloo on the CPU          | refused | gloo on the CPU |
| `nvidia-smi` lists GPUs that torch cannot use             | refused, with the reason | refused | gloo on the CPU |
| more ranks on a machine than GPUs, or GPUs on some only   | refused                  | refused | gloo on the CPU |

Ranks that see the same GPUs take one each, in order; a rank that sees GPUs of its own (`--gpus-per-task=1`: every
rank has a `cuda:0`) takes its first. GPUs are identified by their UUIDs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import warnings
from collections import Counter
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from minimegatron.errors import ConfigError
from minimegatron.launch import drivers

ON_CPU = "--distributed-backend gloo (or an empty CUDA_VISIBLE_DEVICES) computes on the CPU"


@dataclasses.dataclass(frozen=True)
class Look:
    """The hardware that one rank sees.

    Attributes:
        host: name of its machine; `boot` distinguishes machines of one name.
        gpus: UUIDs of the GPUs that torch can use; `name` of the first.
        obstacle, fix: why there are none although the machine has some, and the fix.
        hidden: whether CUDA_VISIBLE_DEVICES hides all GPUs.
    """

    host: str
    gpus: tuple[str, ...] = ()
    name: str = ""
    obstacle: str = ""
    fix: str = ""
    boot: str = ""
    hidden: bool = False

    @property
    def machine(self) -> tuple[str, str]:
        return self.host, self.boot

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Look:
        fields = json.loads(text)
        return cls(**{**fields, "gpus": tuple(fields["gpus"])})


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of a rank: the backend, the index of its GPU, its number on its machine, and a sentence for the
    banner."""

    backend: str
    gpu: int | None
    local_rank: int
    local_world: int
    description: str


def machine() -> tuple[str, str]:
    """Name and boot time of this machine: two machines of one name have booted at different times."""
    boot = ""
    with contextlib.suppress(OSError):  # not Linux: names of machines will do
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot


def look(backend: str | None) -> Look:
    """The hardware that this process sees. With gloo it does not look, so torch does not initialise a GPU."""
    host, boot = machine()
    seen = Look(host, boot=boot, hidden=drivers.hidden(os.environ))
    if backend == "gloo":
        return seen
    with warnings.catch_warnings():  # torch's own words about a driver; `drivers` has the better ones
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if usable:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return dataclasses.replace(seen, gpus=tuple(str(gpu.uuid) for gpu in gpus), name=gpus[0].name)
    what, fix = drivers.obstacle(drivers.nvidia_smi(), torch.__version__, torch.version.cuda, os.environ) or ("", "")
    return dataclasses.replace(seen, obstacle=what, fix=fix)


def choose(backend: str | None, rank: int, looks: Sequence[Look]) -> Choice:
    """The choice of one rank; the backend is the same for all.

    Args:
        backend: "nccl", "gloo", the name of another, or None to choose.
        looks: by rank.

    Raises:
        ConfigError: see the table of the module.
    """
    own = looks[rank]
    peers = [r for r, other in enumerate(looks) if other.machine == own.machine]
    local, machines = peers.index(rank), list(dict.fromkeys(other.machine for other in looks))
    nodes = f"{len(looks)} rank{'s'[: len(looks) > 1]} on {len(machines)} machine{'s'[: len(machines) > 1]}"

    def on_cpu(why: str) -> Choice:
        return Choice(backend or "gloo", None, local, len(peers), f"{backend or 'gloo'} on the CPU ({why}): {nodes}")

    if backend not in (None, "nccl"):
        return on_cpu("as asked")
    if backend is None and not any(other.gpus or other.obstacle for other in looks):
        return on_cpu("CUDA_VISIBLE_DEVICES hides all GPUs" if own.hidden else "no GPU here")
    for r, other in enumerate(looks):
        if not other.gpus:
            what = other.obstacle or f"NCCL needs a GPU for each rank, and rank {r} on {other.host} sees none"
            on_cpu_instead = ON_CPU if backend is None else "--distributed-backend gloo computes on the CPU"
            raise ConfigError(what, fix=f"{other.fix}; {on_cpu_instead}" if other.fix else on_cpu_instead)
    if not dist.is_nccl_available():
        raise ConfigError(f"torch {torch.__version__} sees GPUs and has no NCCL", fix=f"another build of it; {ON_CPU}")
    for machine in machines:
        seated = [other for other in looks if other.machine == machine]
        if len(set(_seats(seated))) < len(seated):
            gpus = len({gpu for other in seated for gpu in other.gpus})
            raise ConfigError(
                f"{len(seated)} ranks on {machine[0]} share {gpus} GPU{'s'[: gpus > 1]}: NCCL wants one for each",
                fix=f"start {gpus} there; {ON_CPU}",
            )
    gpu = own.gpus.index(_seats([looks[r] for r in peers])[local])
    description = f"NCCL: {nodes}, {len(peers)} on this one; rank {rank} on cuda:{gpu} of {len(own.gpus)} ({own.name})"
    return Choice("nccl", gpu, local, len(peers), description)


def _seats(looks: Sequence[Look]) -> list[str]:
    """The GPU of each rank of one machine; if there are too few, one of them occurs twice."""
    seen: Counter[tuple[str, ...]] = Counter()
    seats = []
    for rank in looks:
        seats.append(rank.gpus[seen[rank.gpus] % len(rank.gpus)])
        seen[rank.gpus] += 1
    return seats


def prepare_for_pipelines(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set CUDA's environment for ranks that communicate while they compute; call before torch first uses a GPU.

    `CUDA_MODULE_LOADING=EAGER`: loading a kernel at its first launch may synchronise the device, and then wait for a
    receive under way whose sender waits for this rank. `CUDA_DEVICE_MAX_CONNECTIONS=32`: streams that share a hardware
    queue wait for each other; 8 is CUDA's default, and a rank has a stream for each edge and each group.

    Returns:
        A warning, or "".
    """
    environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32") != "1":
        return ""
    return (
        "CUDA_DEVICE_MAX_CONNECTIONS=1: messages of a pipeline then wait for each other on a GPU, and interleaved "
        "schedules with large groups of microbatches can hang; unset it"
    )
