"""A machine that says it has GPUs, for whoever does not hide them.

`torch.cuda` and NCCL say that they are there, and the first use of either fails: torch is built for CPUs. So a rank
that should not have seen a GPU ends with an error, and what runs to its end kept to the CPU.

Every process that imports torch is told by way of torch's own entry points (`torch.backends`), read at the end of
`import torch` from whatever is on `PYTHONPATH`.
"""

from __future__ import annotations

import os
from pathlib import Path


def environment(folder: Path, gpus: int) -> dict[str, str]:
    """What a process needs to believe that it is on such a machine; `folder` is made its own."""
    told = folder / "gpu_node-1.dist-info"
    told.mkdir(parents=True)
    told.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: gpu_node\nVersion: 1\n")
    told.joinpath("entry_points.txt").write_text("[torch.backends]\ngpu_node = tests.labkit.gpu_node:pretend\n")
    root = str(Path(__file__).resolve().parents[2])
    return {
        "PYTHONPATH": os.pathsep.join([root, str(folder)]),
        "CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in range(gpus)),
    }


def pretend() -> None:
    """Called by torch when it has been imported."""
    import torch

    def seen() -> int:
        return len(list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))

    torch.cuda.device_count = seen
    torch.cuda.is_available = lambda: seen() > 0
    torch.distributed.is_nccl_available = lambda: True
