"""NCCL's groups, on gloo: what NCCL refuses, what makes the host wait, and what travelled.

A group asked for with backend `nccl` is a gloo group here that takes tensors of a GPU and refuses those of the CPU.
`work.wait()` is free on NCCL (the current stream waits, the host goes on); with a timeout the host waits, as
`WorkNCCL::wait(timeout)` does. Both return here when the message is there, never before. What NCCL does with the order
of messages is not simulated.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.rehearsal.capture import forbid, host_waits
from tests.rehearsal.guard import loaded
from tests.rehearsal.record import RECORD, place
from tests.rehearsal.tensor import CudaTensor, unwrap, wrap

_nccl: set[str] = set()  # names of the groups that are NCCL's
_mixed: set[str] = set()  # those that have gloo for CPU tensors besides
# Receives by identity: those that may not have come, and those that a synchronised device has waited for. gloo counts
# waits: a second one for the same message would wait for another message.
_posted: dict[int, dist.Work] = {}
_arrived: dict[int, dist.Work] = {}


def run(func: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
    """One operator of `torch.ops.c10d`."""
    operation = func._schema.name.split("::")[1].rstrip("_")
    group = next((dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and _is_group(x)), None)
    gpu = [x for x in given if isinstance(x, CudaTensor)]
    if group is not None and group.group_name in _nccl:
        _check(operation, given, group)
    if gpu:
        forbid(f"{operation}, whose capture the rehearsal device does not simulate")
        RECORD.launch(operation)
        RECORD.message(operation, sum(x.numel() * x.element_size() for x in gpu))
    out = func(*unwrap(args), **unwrap(kwargs))
    return wrap(out, gpu[0].device.index, {id(x.inner): x for x in gpu}) if gpu else out


def _is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in x._type().qualified_name()


def _check(operation: str, given: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """What NCCL's process group asks of tensors.

    Raises:
        RuntimeError: a CPU tensor; one of another rank's GPU; one with holes.
    """
    if operation == "barrier":
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    devices = loaded().rehearsal_devices()
    for x in given:
        shown = f"{operation} of {tuple(x.shape)} {x.dtype} at {place()}"
        if not isinstance(x, CudaTensor):
            if group.group_name in _mixed:
                continue
            raise RuntimeError(f"No backend type associated with device type {x.device.type}: {shown}")
        if devices >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and x.device.index != local:
            raise RuntimeError(f"Duplicate GPU detected: local rank {local} uses {x.device}: {shown}")
        if not x.is_contiguous():
            raise RuntimeError(f"Tensors must be contiguous: {shown}")


def wait_for_receives() -> None:
    """A synchronised device has received whatever was posted; a receive whose sender never sends runs into the group's
    deadline."""
    for work in list(_posted.values()):
        work.wait()
        _arrived[id(work)] = work


def install() -> None:
    """Put NCCL into `torch.distributed`."""
    for name, function in _replaced().items():
        for module in (dist, c10d):  # P2POp compares the functions of both
            setattr(module, name, function)
    plain_wait = dist.Work.wait

    def wait(self: dist.Work, timeout: datetime.timedelta | None = None) -> Any:
        if timeout is not None and _nccl:
            host_waits("work.wait with a timeout")
        if _arrived.pop(id(self), None) is not None:
            return True
        done = plain_wait(self) if timeout is None else plain_wait(self, timeout)
        _posted.pop(id(self), None)
        return done

    dist.Work.wait = wait


def _replaced() -> dict[str, Any]:
    """Functions of torch.distributed and what stands in their place."""
    real = {name: getattr(c10d, name) for name in ("init_process_group", "new_group", "get_backend", "irecv", "isend")}
    object_device = c10d._get_object_coll_device

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("device_id", None) is not None:
            RECORD.choice("NCCL: eager, one communicator a group")
        kwargs.pop("pg_options", None)
        real["init_process_group"](_gloo(backend), *args, **kwargs)
        _remember(backend, c10d._get_default_group())

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, pg_options: Any = None, **kwargs: Any
    ) -> Any:
        default = c10d._get_default_group().group_name
        if backend is None and default in _nccl:
            backend = "cpu:gloo,cuda:nccl" if default in _mixed else "nccl"
        kwargs.pop("device_id", None)
        group = real["new_group"](ranks, timeout=timeout, backend=_gloo(backend), **kwargs)
        if isinstance(group, dist.ProcessGroup):
            _remember(backend, group)
        return group

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        return "nccl" if _is_nccl(group) else real["get_backend"](group)

    def irecv(*args: Any, **kwargs: Any) -> Any:
        work = real["irecv"](*args, **kwargs)
        if work is not None and _nccl:
            _posted[id(work)] = work
        return work

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
        return [op.op(op.tensor, op.peer, group=op.group, tag=op.tag) for op in ops]

    def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if not _is_nccl(group):
            return plain_barrier(group=group, async_op=async_op)
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        host_waits("barrier")
        return None

    plain_barrier = c10d.barrier
    return {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "get_backend": get_backend,
        "irecv": irecv,
        "batch_isend_irecv": batch_isend_irecv,
        "barrier": barrier,
        "is_nccl_available": lambda: True,
        "_get_object_coll_device": lambda group=None: "cuda" if _is_nccl(group) else object_device(group),
    }


def _gloo(backend: str | None) -> str:
    return "gloo" if backend == "gloo" else "cpu:gloo,cuda:gloo"


def _remember(backend: str | None, group: dist.ProcessGroup) -> None:
    if backend is None or "nccl" in backend:
        _nccl.add(group.group_name)
    if backend is None or "cpu" in backend:
        _mixed.add(group.group_name)


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    found = group if group is not None else c10d._get_default_group()
    return isinstance(found, dist.ProcessGroup) and found.group_name in _nccl
