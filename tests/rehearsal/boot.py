"""Run a script as the ranks of a job, each on a simulated GPU.

    python -m tests.rehearsal.boot script.py args...                        one rank, or the rank of a launcher's
                                                                            environment (RANK, WORLD_SIZE ...)
    python -m tests.rehearsal.boot --nproc 4 --folder F script.py args...   four ranks, forked after the imports

With `--folder` each rank writes there `out.R`, `err.R` and `record.R.json` (see `record.py`), and what it gave to
`minimegatron.launch.rank.report`. `--gpus 0` is the control: the same ranks without the device. The exit status is 0
when every rank's is.

| option          | meaning                                                                       |
|-----------------|-------------------------------------------------------------------------------|
| `--gpus N`      | GPUs of this machine, default one a rank; CUDA_VISIBLE_DEVICES hides some     |
| `--no-kernels`  | there is no compiler for the project's kernels: torch computes                |
| `--flash-attn`  | the package flash-attn is installed                                           |
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path
from typing import NoReturn

GRACE_S = 20.0  # between the first rank that fails and the end of the others


def install(gpus: int, guard: str | None = None, kernels: bool = True, flash_attn: bool = False) -> None:
    """Give this process GPUs. Comes before `import torch`.

    Args:
        gpus: of this machine.
        guard: path of the guard library; default built, if need be, by another process.
        kernels: whether the project's kernels can be compiled (they are emulated).
        flash_attn: whether the package is installed (a stand-in).
    """
    from tests.rehearsal import guard as library

    if guard is None:
        command = [sys.executable, "-m", "tests.rehearsal.guard"]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=library.DEADLINE_S)
        guard = found.stdout.split()[-1]
    library.load(guard)
    import torch
    import torch.nn.attention

    from tests.rehearsal import dispatch, messages, operators, runtime, tensor
    from tests.rehearsal import flash_attn as package
    from tests.rehearsal import kernels as emulated

    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device="cuda") is made on the host and then copied
    library.loaded().rehearsal_set_devices(runtime.visible(gpus))
    runtime.install()
    messages.install()
    torch.nn.functional.scaled_dot_product_attention = operators.attention
    varlen = types.ModuleType("torch.nn.attention.varlen")  # torch's own imports its compiler: 1.6 CPU-seconds
    varlen.varlen_attn = package.varlen_attn  # type: ignore[attr-defined]
    sys.modules[varlen.__name__] = torch.nn.attention.varlen = varlen
    emulated.install(kernels)
    if flash_attn:
        package.install()
    dispatch.install()
    tensor.assign_data()
    tensor.on_every_thread()


def run_script(script: str, arguments: list[str], record_to: Path | None) -> int:
    """Run it as `__main__`; returns its exit status, and leaves the record of what happened."""
    code, sys.argv = 0, [script, *arguments]
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).parent.resolve()))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        if isinstance(request.code, str):
            print(request.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        _keep(record_to)
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
        else:  # `launch.rank.init` has put its own there, which may end the process
            sys.excepthook(type(error), error, error.__traceback__)
    _keep(record_to)
    return code


def _keep(record_to: Path | None) -> None:
    if record_to is not None:
        from tests.rehearsal.record import RECORD

        record_to.write_text(json.dumps(RECORD.to_json()))


def _rank(rank: int, world: int, port: int, options: argparse.Namespace) -> NoReturn:
    """The life of a forked rank."""
    from minimegatron.launch import procs

    procs.die_with_parent(signal.SIGKILL, os.getppid())
    folder = Path(options.folder)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
    if world > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        code = run_script(options.script, options.arguments, folder / f"record.{rank}.json")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nobody waits for threads of a library


def _all_ranks(options: argparse.Namespace) -> int:
    """Fork them, and end what is left a while after the first that fails."""
    if options.nproc > 1:
        import minimegatron.training.build  # noqa: F401  once for all ranks

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: dict[int, int] = {}
    for rank in range(options.nproc):
        pid = os.fork()
        if pid == 0:
            _rank(rank, options.nproc, port, options)
        running[pid] = rank
    worst, ends = 0, None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            Path(options.folder, f"status.{running.pop(pid)}").write_text(str(code))
            worst = worst or code
            ends = time.monotonic() + GRACE_S if code and ends is None else ends
        elif ends is not None and time.monotonic() > ends:
            for left in running:
                os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return abs(worst)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal.boot", allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--guard")
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--flash-attn", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = _options(argv)
    ranks = options.nproc or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = ranks if options.gpus is None else options.gpus
    if gpus:
        install(gpus, options.guard, not options.no_kernels, options.flash_attn)
    if options.nproc is not None:
        return _all_ranks(options)
    record = Path(options.folder, f"record.{os.environ.get('RANK', '0')}.json") if options.folder else None
    return run_script(options.script, options.arguments, record)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
