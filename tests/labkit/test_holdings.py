"""What the learner's objects hold is found in each form that state may take, once, and not what was there before."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import math

import numpy
import pytest
import torch

from labkit import holdings
from labkit.evidence import OpRecorder
from labkit.fresh import Nursery
from labkit.nursery import Limits
from labkit.player import play

N = 4096  # bytes of each state


class Box:
    """What a learner's object may look like."""

    def __init__(self, state: object) -> None:
        self.state = state


class Slotted:
    __slots__ = ("state",)

    def __init__(self, state: object) -> None:
        self.state = state


def suspended(state: object) -> object:
    def run():
        yield state

    found = run()
    next(found)
    return found


def numbers() -> list[float]:
    return [i + 0.5 for i in range(N // holdings.NUMBER)]


STATES = {
    "numpy": lambda: numpy.zeros(N // 4, numpy.float32),
    "a view of numpy": lambda: numpy.zeros(N // 4, numpy.float32).reshape(2, -1)[1:, ::2],
    "numpy of objects": lambda: numpy.array([numpy.zeros(N // 8, numpy.float32) for _ in range(2)] + [None], object),
    "bytearray": lambda: bytearray(N),
    "bytes": lambda: bytes(N),
    "array": lambda: array.array("f", bytes(N)),
    "memoryview": lambda: memoryview(bytearray(N))[:8],
    "ctypes": lambda: (ctypes.c_float * (N // 4))(),
    "over numpy": lambda: torch.from_numpy(numpy.zeros(N // 4, numpy.float32)),
    "over bytes": lambda: torch.frombuffer(bytearray(N), dtype=torch.float32),
    "storage": lambda: torch.zeros(N // 4).untyped_storage(),
    "list": numbers,
    "rows": lambda: [tuple(numbers()[i : i + 16]) for i in range(0, N // holdings.NUMBER, 16)],
    "dict": lambda: dict(enumerate(numbers()[: N // holdings.NUMBER // 2])),
    "deque": lambda: collections.deque(numbers()),
    "text": lambda: "0" * N,
    "one large int": lambda: [1 << 8 * N],
}
HOLDERS = {
    "attribute": Box,
    "slot": Slotted,
    "list": lambda state: [[state]],
    "tensor": lambda state: (tensor := torch.empty(0), setattr(tensor, "state", state))[0],
    "partial": lambda state: functools.partial(print, state),
    "layer": lambda state: (layer := torch.nn.Identity(), setattr(layer, "state", state))[0],
    "generator": suspended,
}


@pytest.mark.parametrize("state", STATES)
def test_state_in_each_form_is_found(state: str) -> None:
    found = holdings.reached([Box(STATES[state]())]).beyond()
    assert N <= found <= 2.1 * N, "a dict counts its keys"


@pytest.mark.parametrize("holder", HOLDERS)
def test_state_in_each_place_is_found(holder: str) -> None:
    assert holdings.reached([HOLDERS[holder](bytearray(N))]).beyond() >= N


def test_memory_counts_once_whoever_views_it() -> None:
    raw = bytearray(N)
    base = numpy.frombuffer(raw, numpy.float32)
    tensor = torch.from_numpy(base)
    views = [raw, memoryview(raw)[5:], base, base[3:9], tensor, tensor[7:].view(-1, 1), tensor.numpy(), Box(tensor[:1])]
    assert holdings.reached(views).beyond() == N
    assert holdings.reached(reversed(views)).beyond() == N


def test_what_was_given_or_returned_is_no_state_unless_it_grew() -> None:
    given = {"x": torch.zeros(N // 4), "numbers": numbers(), "raw": bytearray(N)}
    before = holdings.reached([given])
    box = Box([given["x"][2:], given["x"].numpy()[5:], given["numbers"], given["raw"], given])
    assert holdings.reached([box]).beyond(before) == 0
    given["numbers"] += [0.5] * 100
    given["x"].state = bytearray(500)
    assert holdings.reached([box]).beyond(before) == 100 * holdings.NUMBER + 500
    returned = numpy.ones(N)
    assert holdings.reached([Box(returned)]).beyond(before, holdings.reached([[returned]])) == 0


def test_tensors_of_operations_are_the_recorders() -> None:
    with OpRecorder() as recorder:
        made = torch.ones(N // 4) * 2
    over = torch.from_numpy(numpy.zeros(N // 4, numpy.float32))
    assert recorder.alive() >= N
    assert holdings.reached([Box([made, made.numpy()[4:]]), over], recorder.counts).beyond() == N


def test_others_modules_classes_and_functions_are_not_followed() -> None:
    group = functools.partial(math.prod)
    box = Box([torch, torch.nn.Linear, torch.optim.AdamW, torch.nn.functional.linear, numpy, pytest, group, print])
    assert holdings.reached([box]).beyond() < 64


def test_the_walk_ends() -> None:
    circle: list[object] = []
    circle += [circle, {"again": circle}, bytearray(N)]
    assert holdings.reached([circle]).beyond() == N
    endless = [[] for _ in range(holdings.MOST + 10)]
    assert holdings.reached([endless]).beyond() == 0


HOLDS = """
import functools, numpy, torch

STATE, TABLE = {}, [0.0] * 250

class Mine:
    shared = []

@functools.cache
def cached(n):
    return bytearray(n)

def in_a_global(x):
    STATE["m"] = numpy.zeros(1000, numpy.uint8)
    return x.sum()

def in_a_class(x):
    Mine.shared.append(bytearray(1000))
    return x.sum()

def in_a_cache(x):
    cached(1000)
    return x.sum()

def in_a_default(x, held=[]):
    held.append(numpy.zeros(1000, numpy.uint8))
    return x.sum()

def on_the_input(x):
    x.state = torch.from_numpy(numpy.zeros(250, numpy.float32))
    return x.sum()

def nowhere(x):
    state = numpy.zeros(1000, numpy.uint8)
    return x.sum() + float(state.sum())

def returned(x):
    STATE["m"] = numpy.zeros(1000)
    return STATE["m"]

def a_view(x):
    STATE["m"] = x.numpy()[1:]
    return x.sum()
"""


@pytest.mark.parametrize(
    ("function", "bytes_kept"),
    [("in_a_global", 1000), ("in_a_class", 1000), ("in_a_cache", 1000), ("in_a_default", 1000), ("on_the_input", 1000),
     ("nowhere", 0), ("returned", 0), ("a_view", 0)],
)  # fmt: skip
def test_the_player_counts_what_a_program_keeps(nursery: Nursery, function: str, bytes_kept: int) -> None:
    job = {
        "sources": {"e": HOLDS}, "exercise": "e", "function": function, "drive": None, "world": 0, "members": [],
        "trials": [{"x": torch.ones(8)}], "strided": [False], "groups": [], "spoil": [], "seconds": 5,
        "hidden": "/none", "without": [],
    }  # fmt: skip
    [reply] = nursery.call(play, [job], Limits(seconds=10))
    table = 250 * holdings.NUMBER  # of the module, before the call
    assert reply.value["trials"][0]["evidence"]["alive"] - table in range(bytes_kept, bytes_kept + 16)
