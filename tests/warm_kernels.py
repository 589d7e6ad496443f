"""Kernels of notebooks that are forked in place of executed.

The problem in a sentence: a kernel begins with two to three CPU-seconds of imports (IPython, torch, matplotlib), and
the trunk of warm ranks (`labkit.ranks.fork_server`) has most of these modules already.

    test ── trunk ──fork──> kernel: environment, folder and arguments that its manager gives, then what ipykernel does

Where libraries would read something else in its environment when they are loaded, a kernel is executed as ever. nbval's
are forked (`conftest.py`), and those of some tests.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, NoReturn

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import AsyncKernelManager, KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from labkit.ranks.fork_server import ENVIRONMENT, Forked, suits, trunk
from minimegatron.launch import procs

MODULES = ("ipykernel.kernelapp", "ipykernel.zmqshell", "matplotlib.pyplot", "matplotlib_inline.backend_inline",
           "labkit.magics")  # fmt: skip
_LAUNCHER = "ipykernel_launcher"


class _Warm:
    """Of a manager whose kernels are forks of this process's trunk."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        manager: Any = self
        manager.provisioner = WarmProvisioner(kernel_id="", kernel_spec=manager.kernel_spec, parent=manager)


class WarmManager(_Warm, KernelManager):
    """Such a manager, in place of Jupyter's."""


class AsyncWarmManager(_Warm, AsyncKernelManager):
    """Such a manager, in place of Jupyter's for `nbclient`."""


class WarmProvisioner(LocalProvisioner):
    """Starts a kernel as a fork."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        environment = {"TORCH_CPP_LOG_LEVEL": ENVIRONMENT["TORCH_CPP_LOG_LEVEL"], **kwargs["env"]}
        if not suits(environment):
            return await super().launch_kernel(cmd, **kwargs)
        self.process = WarmKernel(cmd[cmd.index(_LAUNCHER) + 1 :], environment, kwargs.get("cwd") or os.getcwd())
        self.pid = self.pgid = self.process.pid  # it founds its group
        return self.connection_info


class WarmKernel(Forked):
    """A kernel, used as a `Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, arguments: list[str], environment: dict[str, str], cwd: str) -> None:
        near, far = socket.socketpair()
        with near, far:
            super().__init__(trunk(), __name__, far, "", arguments, environment=environment, log=None, cwd=cwd)
            self.trunk.settle()

    def send_signal(self, signum: int) -> None:
        procs.send(self.pid, signum)

    def wait(self, timeout: float = 10.0) -> int:
        return super().wait(timeout)


def serve(sock: socket.socket, _: str, arguments: list[str]) -> NoReturn:
    """As a fork of the trunk: be a kernel until it is shut down."""
    from ipykernel.kernelapp import IPKernelApp

    from labkit.ranks.early import leave

    sock.close()
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    app = IPKernelApp.instance()
    app.initialize(arguments)
    if (matplotlib := sys.modules.get("matplotlib")) is not None:
        matplotlib.rcParams["backend"] = os.environ["MPLBACKEND"]  # which it reads when it is loaded
    app.start()
    leave(0)
