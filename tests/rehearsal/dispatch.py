"""One operator on the simulated device: may it, does the host wait, what does it compute.

    rules.py       what CUDA refuses, and which operators make the host wait
    operators.py   what a CPU build of torch has no kernel for
    messages.py    collectives

Everything else is computed by the CPU's kernel on the CPU memory inside.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from tests.rehearsal import messages, operators, rules
from tests.rehearsal.capture import capturing, forbid, host_waits, tensors_in
from tests.rehearsal.generators import drawing_from
from tests.rehearsal.record import RECORD, place
from tests.rehearsal.tensor import CudaTensor, unwrap, wrap

aten = torch.ops.aten
# Results without a kernel, besides views: only memory is asked for, or its description changes.
NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "detach", "detach_", "lift_fresh", "alias", "resize_", "set_", "is_same_size", "is_pinned",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an operator's schema says.

    Attributes:
        name: without namespace and overload.
        launches: whether a kernel starts.
        draws: it takes random numbers.
        writes: positions and names of the arguments that it changes.
        indexes: it reads at places that a tensor gives.
    """

    name: str
    launches: bool
    draws: bool
    writes: tuple[tuple[int, str], ...]
    indexes: bool


@functools.cache
def facts(func: Any) -> Facts:
    schema = func._schema
    name = schema.name.split("::")[1]
    aliases = [a.alias_info for a in (*schema.arguments, *schema.returns) if a.alias_info is not None]
    view = any(not a.is_write for a in aliases) and not any(a.is_write for a in aliases)
    written = enumerate(schema.arguments)
    return Facts(
        name,
        not (view or name in NO_LAUNCH),
        torch.Tag.nondeterministic_seeded in func.tags,
        tuple((i, a.name) for i, a in written if a.alias_info is not None and a.alias_info.is_write),
        any(word in name for word in ("index", "gather", "scatter", "embedding", "nll_loss", "take", "put")),
    )


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `__torch_dispatch__` calls for every operator."""
    given = tensors_in(args) + tensors_in(kwargs)
    gpu = [x for x in given if isinstance(x, CudaTensor)]
    if func.namespace == "c10d":
        return messages.run(func, args, kwargs, given)
    what = facts(func)
    if what.name == "_to_copy":
        return _to_copy(args[0], kwargs)
    if not gpu:
        return _factory(func, what, args, kwargs)
    if what.name in ("_local_scalar_dense", "is_nonzero", "equal", "allclose"):
        host_waits("item" if what.name == "_local_scalar_dense" else what.name)
        return func(*unwrap(args), **unwrap(kwargs))
    if what.name == "copy_" and isinstance(args[0], CudaTensor) != isinstance(args[1], CudaTensor):
        return _copy_between(args[0], args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2])))
    if (device := kwargs.get("device")) is not None and torch.device(device).type == "cpu":
        return func(*unwrap(args), **unwrap(kwargs))  # x.new_zeros(3, device="cpu")
    index = rules.check_devices(func, what, args, kwargs, given)
    rules.check_operands(what.name, args, kwargs)
    rules.count_waits(func, what.name, args, kwargs)
    if func.namespace not in ("aten", "prims", "prim") and str(func.name()).split(".")[0] in OPDEFS:
        with torch.no_grad():  # its body: operators of torch and launches, each counted by itself
            return OPDEFS[str(func.name()).split(".")[0]]._init_fn(*args, **kwargs)
    return _compute(func, what, args, kwargs, gpu, index)


def _compute(func: Any, what: Facts, args: Any, kwargs: dict[str, Any], gpu: list[CudaTensor], index: int) -> Any:
    call = operators.TABLE.get(what.name, func)
    inner_args, inner_kwargs = unwrap(args), unwrap(kwargs)
    generator = inner_kwargs.get("generator")
    if generator is not None:
        rules.check_generator(generator, index)
        inner_kwargs["generator"] = None

    def compute() -> Any:
        with drawing_from(generator, index, what.draws):
            try:
                return call(*inner_args, **inner_kwargs)
            except (IndexError, RuntimeError) as error:
                if what.indexes and re.search("out of (range|bounds)", str(error)):
                    message = f"CUDA error: device-side assert triggered, in {func} at {place()}: {error}"
                    raise RuntimeError(message) from None
                raise

    launched = what.launches and not (call is func and all(x.numel() == 0 for x in gpu))
    if launched:
        RECORD.launch(what.name)
    tape = capturing()
    if tape is None or not what.launches:
        out = compute()
    else:
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in what.writes]
        out = tape.run(compute, [x.inner for x in gpu], [x.inner for x in tensors_in(written)])
    result = wrap(out, index, {id(x.inner): x for x in gpu})
    for x in gpu if what.writes else ():
        if x.shape != x.inner.shape or x.stride() != x.inner.stride():  # resize_, t_, unsqueeze_
            torch.Tensor.data.__set__(x, CudaTensor(x.inner, index))
    return result


def _factory(func: Any, what: Facts, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator without a tensor of a GPU among its arguments: on a GPU if `device` says so."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cuda":
        return func(*args, **kwargs)
    index = rules.index_of(torch.device(device))
    if kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    inner = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    return _compute(func, what, args, {**inner, "device": torch.device("cpu")}, [], index)


# ------------------------------------------------------------------------------------------------------- copies


def _to_copy(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """`x.to(...)`: between devices or between dtypes."""
    target = torch.device(kwargs.get("device") or source.device)
    lazy = bool(kwargs.get("non_blocking"))
    inner_kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
    inner = unwrap(source)

    def compute() -> torch.Tensor:
        return aten._to_copy.default(inner, **inner_kwargs)

    if target.type != "cuda":
        if not isinstance(source, CudaTensor):
            return aten._to_copy.default(source, **kwargs)
        if not lazy:  # with non_blocking torch copies into pinned memory, and nobody waits
            host_waits("copy to the host")
        RECORD.launch("copy to the host")
        return compute()
    index = rules.index_of(target)
    if not isinstance(source, CudaTensor):
        _from_host(source, lazy)
    RECORD.launch("_to_copy")
    tape = capturing()
    return CudaTensor(compute() if tape is None else tape.run(compute, [inner], []), index)


def _from_host(source: torch.Tensor, lazy: bool) -> None:
    """The host waits unless it copies from pinned memory and has said that it will not wait."""
    if source.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    pinned = source.is_pinned()
    if not (pinned and lazy):
        host_waits(f"copy from {'pinned' if pinned else 'pageable'} memory{', non_blocking' if lazy else ''}")


def _copy_between(to: torch.Tensor, source: torch.Tensor, lazy: bool) -> torch.Tensor:
    """`to.copy_(source)` between the host and a GPU."""
    RECORD.launch("copy_")
    if isinstance(to, CudaTensor):
        _from_host(source, lazy)
        tape, inner = capturing(), to.inner
        if tape is None:
            inner.copy_(source)
        else:
            tape.run(lambda: inner.copy_(source), [inner], [inner])
        return to
    if not (lazy and to.is_pinned()):
        host_waits("copy to the host")
    else:
        forbid("copy to the host, which the rehearsal device does not record")
    return to.copy_(unwrap(source))


# ------------------------------------------------------------------------------------------------------ memory
# Threads of the autograd engine know no mode. There torch's own factories and copies come down to these.

_library = torch.library.Library("aten", "IMPL")


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> CudaTensor:
    form = torch.contiguous_format if memory_format is None else memory_format
    return CudaTensor(torch.empty(size, dtype=dtype, device="cpu", memory_format=form), rules.index_of(device))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> CudaTensor:
    return CudaTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), rules.index_of(device))


def _fill_from_host(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`torch.tensor(1.0, device="cuda")` copies with `__torch_dispatch__` switched off."""
    return _copy_between(to, source, non_blocking)


def install() -> None:
    """Give torch the operators that make memory of a GPU and fill it from the host."""
    _library.impl("empty.memory_format", _empty, "CUDA")
    _library.impl("empty_strided", _empty_strided, "CUDA")
    _library.impl("copy_", _fill_from_host, "CUDA")
