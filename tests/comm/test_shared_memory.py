"""Messages through shared memory are those of TCP, whoever is late, and none is overwritten before it has been read."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.evidence import Witness
from labkit.ranks.pool import WarmPool
from minimegatron.comm import collectives as c
from minimegatron.comm import shared_memory
from minimegatron.comm.axis import Axis
from minimegatron.comm.ring import Shift
from minimegatron.errors import RankError
from minimegatron.launch.error_report import is_consequence

NEVER, ALWAYS = 1 << 60, 1


def through(min_bytes: int) -> Any:
    """In the block messages of this many bytes and more go through shared memory."""
    return mock.patch.object(shared_memory, "MIN_BYTES", min_bytes)


def terms(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    x = 8 * torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return x.to(dtype)


def start(name: str, x: torch.Tensor, axis: Axis) -> Any:
    """Begin one of the collectives; it may be given a copy of `x` to work in."""
    if name == "all_gather in place":
        whole = x.new_zeros(axis.size * x.numel())
        part = whole.chunk(axis.size)[axis.rank]
        return c.all_gather_start(part.copy_(x), axis, whole)
    if name == "reduce_scatter in place":
        own = x.clone()
        return c.reduce_scatter_start(own, axis, own.chunk(axis.size)[axis.rank])
    if name == "shift":
        return Shift(x.clone(), axis)
    if name == "uneven all_to_all":  # three elements stay here, all others go to the last rank
        sent = [0] * axis.size
        sent[-1] = x.numel() - 3
        sent[axis.rank] += 3
        got = [x.numel() - 3 if axis.is_last else 0] * axis.size
        got[axis.rank] += 3
        return c.all_to_all_start(x, axis, got, sent)
    begin: dict[str, Callable[..., Any]] = {
        "all_reduce": c.all_reduce_start, "all_gather": c.all_gather_start,
        "reduce_scatter": c.reduce_scatter_start, "all_to_all": c.all_to_all_start,
    }  # fmt: skip
    return begin[name](x.clone(), axis)


NAMES = [
    "all_reduce", "all_gather", "all_gather in place", "reduce_scatter", "reduce_scatter in place", "all_to_all",
    "uneven all_to_all", "shift",
]  # fmt: skip


def both_ways(rank: int, world: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Every collective's result through shared memory and through TCP."""
    axis, found = Axis.world("world"), {}
    x = terms(rank, 12 * 4096, dtype)
    for name in NAMES:
        with through(ALWAYS):
            shared = start(name, x, axis).wait().clone()
        with through(NEVER):
            found[name] = shared, start(name, x, axis).wait().clone()
    assert shared_memory.nbytes() >= x.nbytes, "nothing went through shared memory"
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_gives_what_it_gives_through_tcp(ranks, world: int, dtype: torch.dtype) -> None:
    """A sum in float32 is added in the order of the ranks, with the same bits everywhere."""
    in_order = functools.reduce(torch.add, [terms(rank, 12 * 4096, dtype) for rank in range(world)])
    for of_rank in ranks(world).run(both_ways, dtype):
        assert dtype == torch.bfloat16 or torch.equal(of_rank["all_reduce"][0], in_order)
        for name, (shared, tcp) in of_rank.items():
            if name == "all_reduce" and world > 2:  # gloo adds in another order
                shared, tcp, close = shared.double(), tcp.double(), 8 * world * torch.finfo(torch.float32).eps
                assert torch.allclose(shared, tcp, rtol=close if dtype != torch.bfloat16 else 0.05, atol=0.3), name
            else:
                assert torch.equal(shared, tcp), name


def late_reader(rank: int, world: int) -> list[list[float]]:
    """[first and last of every message]: rank 1 reads none before all have been sent."""
    axis, found, waiting = Axis.world("world"), [], []
    with through(ALWAYS):
        for number in range(6):
            x = torch.full((50_000,), float(10 * number + rank))
            waiting.append(c.all_gather_start(x, axis))
            if rank == 0:
                found.append(waiting.pop().wait())
            x.fill_(-1.0)  # it has been taken, or the message is not under way any more
        time.sleep(0.1 * rank)
        found += [pending.wait() for pending in waiting]
    return [[float(y[0]), float(y[49_999]), float(y[50_000]), float(y[-1])] for y in found]


def test_a_message_stays_until_a_late_reader_has_read_it(ranks) -> None:
    want = [[10.0 * n, 10.0 * n, 10.0 * n + 1, 10.0 * n + 1] for n in range(6)]
    assert ranks(2).run(late_reader) == [want, want]


def largest_and_smallest(rank: int, world: int) -> list[torch.Tensor]:
    """max and min of the ranks' terms, of a size that memory would carry, and of what they are."""
    axis, x = Axis.world("world"), terms(rank, 4096, torch.float32)
    with through(ALWAYS):
        found = [c.all_reduce_start(x.clone(), axis, op).wait() for op in ("max", "min")]
    everyone = torch.stack([terms(r, 4096, torch.float32) for r in range(world)])
    return [*found, everyone.amax(0), everyone.amin(0)]


def test_what_is_no_sum_is_not_added(ranks) -> None:
    for largest, smallest, most, least in ranks(2).run(largest_and_smallest):
        assert torch.equal(largest, most) and torch.equal(smallest, least)


def gone_when_closed(rank: int, world: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """`both_ways` where a sender writes another message into its slot at the very moment at which it may."""
    let_go = shared_memory.Message.close

    def close(message: shared_memory.Message) -> None:
        memory = message._memory
        assert memory is not None
        start, nbytes = shared_memory.HEAD, shared_memory._words(memory)[shared_memory._LENGTH]
        if world == 2 or nbytes < 12 * 4096 * dtype.itemsize:  # it has no other reader
            memory[start : start + nbytes] = bytes(nbytes)
        let_go(message)

    with mock.patch.object(shared_memory.Message, "close", close):
        return both_ways(rank, world, dtype)


@pytest.mark.parametrize("world", [2, 3])
def test_a_message_is_let_go_of_when_its_numbers_have_been_used(ranks, world: int) -> None:
    """In an all-reduce of three a slot has two readers, and neither knows which is the last."""
    for of_rank in ranks(world).run(gone_when_closed, torch.float64):
        for name, (shared, tcp) in of_rank.items():
            assert torch.allclose(shared, tcp, rtol=1e-12, atol=1e-12), name


def one_reader_is_late(rank: int, world: int) -> list[float]:
    """What the last rank reads of the first one's messages, each of which the rank between has read long before."""
    axis, x = Axis.world("world"), torch.zeros(50_000)
    assert shared_memory.agreed(axis)
    if rank == 0:
        for number in range(4):
            shared_memory.send_message(x.fill_(number), axis, [1, 2])
            c.barrier(axis)
        return []
    messages, found = [], []
    for _ in range(4):
        messages.append(shared_memory.Message(axis, 0))
        messages[-1].wait()
        if rank == 1:
            messages[-1].copy_to(x)
            found.append(float(x[-1]))
        c.barrier(axis)
    if rank == 2:
        for message in messages:
            message.copy_to(x)
            found.append(float(x[-1]))
    return found


def test_a_slot_is_free_when_its_last_reader_has_read_it(ranks) -> None:
    assert ranks(3).run(one_reader_is_late) == [[], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]


def slots_after(rank: int, world: int) -> int:
    axis = Axis.world("world")
    x = torch.zeros(50_000)
    with through(ALWAYS):
        for _ in range(40):
            c.all_gather_start(x, axis).wait()
            c.barrier(axis)  # 4 bytes, and all have read
    return len(shared_memory._slots)


def test_a_slot_is_used_again() -> None:
    with WarmPool(2) as pool:  # processes of its own, which have no slots yet
        assert max(pool.run(slots_after)) <= 4


def sent_as_it_is(rank: int, world: int) -> tuple[int, list[list[float]], str]:
    """Slots that three gathers of one tensor need, what they give, and the error where nobody reads.

    Rank 0 changes the tensor as soon as it may; the others read late.
    """
    axis, found = Axis.world("world"), []
    before = len(shared_memory._slots)
    with through(ALWAYS):
        held = c.outgoing(torch.full((50_000,), float(rank)), axis)
        for number in (1, 2):
            waiting = [c.all_gather_start(held, axis) for _ in range(number)]
            time.sleep(0.05 * rank)
            found += [float(y[-1 - 50_000 * other]) for y in (p.wait() for p in waiting) for other in range(world)]
            c.await_readers(held, axis)
            held += 10
        slots, told = len(shared_memory._slots) - before, ""
        shared_memory.send_message(held, axis, [(rank + 1) % world])
        message = shared_memory.Message(axis, (rank - 1) % world)
        with mock.patch.object(shared_memory._agreed_pipes(axis), "seconds", 0.05):
            try:
                c.await_readers(held, axis)
            except RuntimeError as error:
                told = str(error)
        c.barrier(axis)
        message.wait()
        message.close()
        c.await_readers(held, axis)
    return slots, found, told


def test_a_tensor_that_is_sent_again_and_again_is_not_copied_and_changes_when_all_have_read_it(ranks) -> None:
    for slots, found, told in ranks(3).run(sent_as_it_is):
        assert slots == 0 and found == [2.0, 1.0, 0.0] + 2 * [12.0, 11.0, 10.0]
        assert "Timed out waiting 50ms for the ranks (0, 1, 2) to read 200,000 bytes of rank" in told


Program = list[tuple[str, int, int]]  # collective, elements, how many more begin before it is waited for


def played(rank: int, world: int, program: Program, min_bytes: int) -> list[torch.Tensor]:
    axis, found, waiting = Axis.world("world"), [], []
    with through(min_bytes):
        for number, (name, numel, lag) in enumerate(program):
            x = terms(10 * number + rank, world * numel, torch.float64).round()  # sums in any order are equal
            waiting.append((number + lag, start(name, x, axis)))
            due = [pending for at, pending in waiting if at <= number]
            waiting = [(at, pending) for at, pending in waiting if at > number]
            found += [pending.wait().clone() for pending in due]
        found += [pending.wait().clone() for _, pending in waiting]
    return found


@settings(max_examples=6)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(4, 3000), st.integers(0, 3)), min_size=1, max_size=12
    ),
    world=st.sampled_from([2, 3]),
)
def test_any_program_of_collectives_gives_what_it_gives_through_tcp(ranks, program: Program, world: int) -> None:
    shared, mixed, tcp = (ranks(world).run(played, program, least) for least in (ALWAYS, 16_384, NEVER))
    for x, y, z in zip(*(sum(of, []) for of in (shared, mixed, tcp)), strict=True):
        assert torch.equal(x, z) and torch.equal(y, z)


@pytest.fixture(scope="module")
def three() -> Iterator[WarmPool]:
    """Processes of these tests alone: nobody else's messages are in their memory."""
    with WarmPool(3) as pool:
        yield pool


@contextlib.contextmanager
def lacking_memfd() -> Iterator[None]:
    """As on a system that is not Linux."""
    memfd_create = os.memfd_create
    del os.memfd_create
    try:
        yield
    finally:
        os.memfd_create = memfd_create


def without_memory(rank: int, world: int, which: str) -> tuple[bool, int, float]:
    """A rank that cannot read the others', or is on another machine."""
    axis = Axis.world("world")
    shared_memory._forget()  # those of the cases before
    cannot: Any = contextlib.nullcontext()
    if rank == 1 and which == "may not open them":
        cannot = mock.patch.object(shared_memory, "_open", side_effect=PermissionError("no"))
    elif rank == 1 and which == "is elsewhere":
        cannot = mock.patch.object(shared_memory, "_machine", return_value=7)
    elif rank == 1 and which == "may not make any":
        cannot = mock.patch.object(shared_memory.os, "memfd_create", side_effect=PermissionError("no"))
    elif rank == 1 and which == "has no /proc":
        cannot = mock.patch.object(shared_memory.os, "readlink", side_effect=FileNotFoundError("no"))
    elif rank == 1 and which == "has no memfd":
        cannot = lacking_memfd()
    with cannot, through(ALWAYS):
        total = c.all_reduce_start(torch.full((50_000,), rank + 1.0), axis).wait()
    return shared_memory.shares_memory(axis, total), len(shared_memory._slots), float(total[-1])


@pytest.mark.parametrize(
    "which", ["may not open them", "is elsewhere", "may not make any", "has no /proc", "has no memfd"]
)
def test_where_one_rank_cannot_take_part_all_go_through_tcp(three: WarmPool, which: str) -> None:
    for shared, slots, total in three.run(without_memory, which):
        assert (shared, total) == (False, 6.0) and slots <= 1  # that which the others tried to read
    assert [shared for shared, _, _ in three.run(without_memory, "")] == [True] * 3, "that rank alone was the reason"


def test_only_the_slot_that_was_meant_is_opened() -> None:
    slot = shared_memory._Slot(100)
    try:
        shared_memory._open(os.getpid(), slot.fd, slot.size, slot.number).close()
        with pytest.raises(OSError, match="not the slot that was meant"):
            shared_memory._open(os.getpid(), slot.fd, slot.size, slot.number + 1)
        with pytest.raises(OSError, match=r"length|size"):
            shared_memory._open(os.getpid(), slot.fd, 2 * slot.size, slot.number)
        with pytest.raises(OSError):
            shared_memory._open(2**22 + 1, slot.fd, slot.size, slot.number)  # no process has such a number
    finally:
        os.close(slot.fd)


def test_a_forked_process_has_no_slots_of_its_parent() -> None:
    slot = shared_memory._Slot(100)
    shared_memory._slots.append(slot)
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(shared_memory._slots) + (os.path.exists(f"/proc/self/fd/{slot.fd}")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shared_memory._slots.remove(slot)
        os.close(slot.fd)


def sender_is_gone(rank: int, world: int) -> str:
    """Rank 1 sends an envelope for a slot of a process that has ended, which is how a death looks between two calls."""
    axis = Axis.world("world")
    assert shared_memory.shares_memory(axis, torch.zeros(1))
    if rank == 1:
        pipes, head = shared_memory._agreed_pipes(axis), shared_memory._Slot(100).head
        pipes.write(0, (2**22 + 1, *head[1:], 0), 0, "rank 0")
        return ""
    try:
        shared_memory.Message(axis, 1).wait()
    except RuntimeError as error:
        assert is_consequence(error)
        return str(error)
    return "it was read"


def test_a_sender_that_has_ended_is_a_lost_connection(ranks) -> None:
    told = ranks(2).run(sender_is_gone)[0]
    assert told.startswith("Connection closed by peer: rank 1")


def witnessed(rank: int, world: int) -> int:
    axis = Axis.world("world")
    x = torch.zeros(60_000)
    with through(ALWAYS), Witness(rank) as witness:
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            start(name, x, axis).wait()
    return witness.evidence().nbytes("send")


def test_who_counts_messages_counts_the_tensors_and_not_the_envelopes(ranks) -> None:
    assert ranks(3).run(witnessed) == [240_000 * 2 + 160_000 + 160_000] * 3


def other_sizes(rank: int, world: int) -> str:
    axis = Axis.world("world")
    with through(ALWAYS):
        pending = c.all_gather_start(torch.zeros(50_000 - 1000 * rank), axis)
        try:
            pending.wait()
        except RuntimeError as error:
            return str(error)
    return "it was read"


def test_a_tensor_of_another_size_is_refused(pools) -> None:
    first, second = pools(2).run(other_sizes)
    assert first.startswith("rank 1 sent 196,000 bytes where this rank expects 200,000 (torch.float32, (50000,))")
    assert second.startswith("rank 0 sent 200,000 bytes where this rank expects 196,000")


def dies(rank: int, world: int) -> float:
    axis = Axis.world("world")
    x = torch.ones(50_000)
    c.all_reduce_start(x, axis).wait()
    if rank == 1:
        os._exit(3)
    return float(c.all_reduce_start(x, axis).wait()[0])


def test_a_rank_that_dies_is_named() -> None:
    with WarmPool(2) as pool, through(ALWAYS), pytest.raises(RankError, match="rank 1"):
        pool.run(dies, timeout=20)


SP, PP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
