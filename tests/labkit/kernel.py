"""A real notebook kernel for tests: cells in, what a learner would read out."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from jupyter_client.manager import KernelManager

from labkit.ranks.agent import marked
from minimegatron.launch import procs
from minimegatron.launch.procs import RUN_DIR

ROOT = Path(__file__).resolve().parents[2]


class Said(NamedTuple):
    """What a cell showed: its streams and results as text, and its error as text ("" without one)."""

    text: str
    error: str


class Kernel:
    """`with Kernel(folder) as kernel: kernel.run("1 + 1").text` is "2"; `more` goes into its environment.

    Python is executed for it, as for a learner's, unless another manager forks it (`tests/warm_kernels`).
    """

    def __init__(self, folder: Path, manager: type[KernelManager] = KernelManager, **more: str) -> None:
        self.sockets = tempfile.TemporaryDirectory()  # a short path: a socket's may have 107 characters
        self.manager = manager(transport="ipc", ip=f"{self.sockets.name}/kernel")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        environment |= {"IPYTHONDIR": str(folder / ".ipython"), **more}
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.client.context.destroy()
        self.sockets.cleanup()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def start(self, cell: str) -> str:
        """Send a cell; the message's id, for `wait`."""
        return str(self.client.execute(cell))

    def wait(self, message: str, seconds: float = 120.0) -> Said:
        text, error, deadline = "", "", time.monotonic() + seconds
        while True:
            reply = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            content, kind = reply["content"], reply["msg_type"]
            if reply["parent_header"].get("msg_id") != message:
                continue
            if kind == "stream":
                text += content["text"]
            elif kind in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "") + "\n"
            elif kind == "error":
                error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return Said(text.rstrip("\n"), error)

    def run(self, cell: str, seconds: float = 120.0) -> Said:
        return self.wait(self.start(cell), seconds)


def processes_of(kernel: Kernel, name: str) -> set[int]:
    """Of the agent and the ranks of the `%%torchrun` cell of this name, in the lab 00_mini."""
    folder = Path(os.readlink(f"/proc/{kernel.pid}/cwd"), ".work", "00_mini", "runs", name)
    return {pid for pid in marked(f"{RUN_DIR}={folder}") if procs.zombie_status(pid) is None}
