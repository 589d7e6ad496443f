"""`torch.cuda` without a driver: devices, streams, events, graphs, memory that nobody measures.

Streams have a name and no time: work is done when it is told, so whatever depends on what overtakes what cannot be seen
here. What waits for the host's sake is counted (`capture.host_waits`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.rehearsal import capture, generators, messages, rules
from tests.rehearsal.guard import loaded
from tests.rehearsal.record import RECORD

NAME = "NVIDIA H100 80GB HBM3"  # whose numbers decide what kernels are chosen
TOTAL = 80 << 30
_stream_ids = itertools.count(32)
_began: list[bool] = []


def _index(device: Any = None) -> int:
    if device is None:
        return loaded().rehearsal_device()
    return device if isinstance(device, int) and device >= 0 else rules.index_of(torch.device(device))


class Stream:
    """A name for an order of work."""

    def __init__(self, device: Any = None, priority: int = 0, id: int | None = None) -> None:
        self.device, self.cuda_stream = torch.device("cuda", _index(device)), next(_stream_ids) if id is None else id

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        capture.host_waits("stream.synchronize")

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.cuda_stream) == (other.device, other.cuda_stream)

    def __hash__(self) -> int:
        return hash((self.device, self.cuda_stream))


class Event:
    """A moment of the host's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timing, self._at = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        self._at: float | None = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        capture.host_waits("event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000.0 * (end._at - self._at) or 1e-3


class CUDAGraph:
    """A tape of operators (`capture.Tape`)."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape: capture.Tape | None = None
        self._states: dict[int, torch.Tensor] = {}

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._states = {i: generators.default(i).get_state() for i in range(loaded().rehearsal_devices())}
        self._tape = capture.begin()

    def capture_end(self) -> None:
        capture.finish()
        for index, state in self._states.items():
            generators.default(index).set_state(state)

    def replay(self) -> None:
        if self._tape is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        RECORD.launch("graph replay")
        with torch.no_grad():
            self._tape.replay()

    def reset(self) -> None:
        self._tape = None

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """`torch.cuda.graph`: what is told inside is captured."""
    synchronize()
    with on_stream(stream if stream is not None else Stream()):
        cuda_graph.capture_begin()
        try:
            yield
        finally:
            cuda_graph.capture_end()


def synchronize(device: Any = None) -> None:
    """Every stream of the device has come to its end, those on which receives wait as well."""
    capture.host_waits("cuda.synchronize")
    messages.wait_for_receives()


def empty_cache() -> None:
    """cudaFree waits for the whole device."""
    capture.host_waits("empty_cache")
    messages.wait_for_receives()


@contextlib.contextmanager
def on_device(device: Any) -> Iterator[None]:
    """`with torch.cuda.device(d)`; None and a negative index change nothing."""
    lib, before = loaded(), loaded().rehearsal_device()
    if device is not None and device != -1:
        lib.rehearsal_set_device(_index(device))
    try:
        yield
    finally:
        lib.rehearsal_set_device(before)


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """`with torch.cuda.stream(s)`."""
    if stream is None:
        yield
        return
    lib, index = loaded(), stream.device.index
    with on_device(index):
        before = lib.rehearsal_stream(index)
        lib.rehearsal_set_stream(index, stream.cuda_stream)
        try:
            yield
        finally:
            lib.rehearsal_set_stream(index, before)


def set_device(device: Any) -> None:
    if loaded().rehearsal_set_device(_index(device)):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {device} of {loaded().rehearsal_devices()}")
    _began.append(True)


def visible(gpus: int) -> int:
    """How many of this machine's GPUs CUDA_VISIBLE_DEVICES shows."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return gpus
    shown = 0
    for entry in listed.split(","):
        if not entry.strip().isdigit() or int(entry) >= gpus:
            break
        shown += 1
    return shown


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=TOTAL, multi_processor_count=132, L2_cache_size=50 << 20,
        warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        uuid=f"GPU-rehearsal-{_index(device)}",
    )  # fmt: skip


def functions() -> dict[str, Any]:
    """What stands in `torch.cuda`."""
    devices = loaded().rehearsal_devices

    def zero(*_: Any) -> int:
        return 0

    def seed(value: int) -> None:
        generators.default(_index()).manual_seed(value)

    def seed_all(value: int) -> None:
        for index in range(devices()):
            generators.default(index).manual_seed(value)

    def begin() -> None:
        _began.append(True)

    return {
        "is_available": lambda: devices() > 0, "device_count": lambda: devices(),
        "is_initialized": lambda: bool(_began),
        "init": begin, "_lazy_init": begin, "current_device": lambda: _index(), "set_device": set_device,
        "device": on_device, "stream": on_stream, "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph,
        "graph": graph, "synchronize": synchronize, "empty_cache": empty_cache, "get_device_properties": properties,
        "get_device_name": lambda device=None: NAME, "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"], "is_bf16_supported": lambda *_, **__: True,
        "current_stream": lambda device=None: Stream(device, id=loaded().rehearsal_stream(_index(device))),
        "default_stream": lambda device=None: Stream(device, id=0),
        "is_current_stream_capturing": lambda: capture.capturing() is not None,
        "memory_allocated": zero, "max_memory_allocated": zero, "memory_reserved": zero, "max_memory_reserved": zero,
        "reset_peak_memory_stats": zero, "mem_get_info": lambda device=None: (TOTAL, TOTAL), "ipc_collect": zero,
        "memory_stats": lambda device=None: {}, "manual_seed": seed, "manual_seed_all": seed_all,
        "_sleep": zero,
        "get_rng_state": lambda device=None: generators.default(_index(device)).get_state(),
        "set_rng_state": lambda state, device=None: generators.default(_index(device)).set_state(state),
        "initial_seed": lambda: generators.default(_index()).initial_seed(), "check_error": zero,
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=zero, cudaProfilerStop=zero),
    }  # fmt: skip


def install() -> None:
    """Put the runtime into `torch.cuda`."""
    for name, value in functions().items():
        setattr(torch.cuda, name, value)
    torch.accelerator.synchronize = synchronize
    torch.cuda.nvtx.range = lambda *_: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.mark = lambda *_: 0
    torch.cuda.nvtx.range_pop = lambda: 0
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    torch.version.cuda = torch.version.cuda or "13.0"
