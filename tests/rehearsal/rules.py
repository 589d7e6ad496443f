"""What CUDA refuses, and which operators make the host wait. Each rule has its test in `test_device.py`.

Sources: `TensorIterator` and the device checks that torch generates for each operator (mixed devices),
`aten/src/ATen/native/cuda` (sizes that depend on data), `Blas.cpp` (products of integers).
"""

from __future__ import annotations

from typing import Any

import torch

from tests.rehearsal.capture import host_waits
from tests.rehearsal.guard import loaded
from tests.rehearsal.record import place
from tests.rehearsal.tensor import CudaTensor

# A CPU scalar may stand beside tensors of a GPU where operators compute element by element; these look closer.
NO_CPU_SCALAR = (
    "embedding", "index_select", "gather", "scatter", "scatter_add", "mm", "bmm", "addmm", "baddbmm", "mv", "dot",
    "cat", "stack", "index_add", "index_copy", "native_layer_norm", "_softmax", "_log_softmax", "nll_loss_forward",
    "topk", "sort", "_scaled_mm",
)  # fmt: skip
INDEXED = ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put")
SIZE_DEPENDS_ON_DATA = (
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc", "mode",
)  # fmt: skip
INTEGER_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot")


class MixedDevices(RuntimeError):
    """Tensors of several devices in one operator."""


def index_of(device: torch.device) -> int:
    """Which GPU `device` means; "cuda" alone is the current one.

    Raises:
        RuntimeError: there is no such GPU.
    """
    lib = loaded()
    index = lib.rehearsal_device() if device.index is None else device.index
    if not 0 <= index < (devices := lib.rehearsal_devices()):
        raise RuntimeError(f"CUDA error: invalid device ordinal: cuda:{index} of {devices} at {place()}")
    return index


def check_devices(func: Any, what: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]) -> int:
    """The GPU on which an operator runs.

    Raises:
        MixedDevices: its tensors are on several devices.
    """
    name = what.name.rstrip("_")
    if name in INDEXED and not isinstance(args[0], CudaTensor):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor (cpu), at {place()}"
        )
    strict = [x for x in given if isinstance(x, CudaTensor) or x.dim() > 0 or name in NO_CPU_SCALAR]
    if name in INDEXED:  # indices may be on the CPU: torch copies them
        indices = {id(x) for x in args[1] if x is not None}
        strict = [x for x in strict if id(x) not in indices or isinstance(x, CudaTensor)]
    strict += [x for i, n in what.writes if isinstance(x := args[i] if i < len(args) else kwargs.get(n), torch.Tensor)]
    devices = sorted({str(x.device) for x in strict})
    if len(devices) > 1:
        shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in given)
        raise MixedDevices(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices)}! "
            f"{func} of {shapes} at {place()}"
        )
    index = next(x.device.index for x in strict if isinstance(x, CudaTensor))
    if (device := kwargs.get("device")) is not None:
        return index_of(torch.device(device))
    return index


def check_operands(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse dtypes for which CUDA has no kernel while the CPU has one."""
    if name.rstrip("_") in INTEGER_PRODUCTS:
        dtype = args[0].dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            raise RuntimeError(f'"{name}_cuda" not implemented for {dtype}, at {place()}')


def check_generator(generator: torch.Generator, index: int) -> None:
    """A generator of another device is refused."""
    if generator.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu', at {place()}")
    if generator.device.index != index:
        raise RuntimeError(f"Expected a generator of cuda:{index} but found {generator.device}, at {place()}")


def count_waits(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """The host waits where the size of a result depends on data, and where torch copies CPU indices."""
    if name in SIZE_DEPENDS_ON_DATA:
        host_waits(f"size depends on data: {name}")
    if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
        host_waits("size depends on data: repeat_interleave without output_size")
    if name.rstrip("_") in INDEXED and not _fills(args):
        for index in args[1]:
            if index is None:
                continue
            if index.dtype in (torch.bool, torch.uint8):
                host_waits(f"boolean mask in {name.strip('_')}")
            elif not isinstance(index, CudaTensor):
                host_waits(f"copy from pageable memory: CPU index in {name.strip('_')}")


def _fills(args: Any) -> bool:
    """`x[mask] = 1.0`: one mask and one number of the host, which torch makes a `masked_fill_`."""
    given = [index for index in args[1] if index is not None]
    accumulate = len(args) > 3 and args[3]
    one = len(args) > 2 and args[2].numel() == 1 and not isinstance(args[2], CudaTensor) and not accumulate
    return one and len(given) == 1 and given[0].dtype in (torch.bool, torch.uint8)
