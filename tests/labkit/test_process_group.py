"""The process group of a check gives what gloo gives, and its log says what a program has done."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed import distributed_c10d

from labkit import plain, process_group
from labkit.evidence import Evidence, OpRecorder
from labkit.ranks.pool import WarmPool
from tests.thorough import mostly_thorough

Talk = Callable[[int, int], Any]
TALKS: dict[str, Talk] = {}


def talk(function: Talk) -> Talk:
    TALKS[function.__name__] = function
    return function


def _text(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _x(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * (rank + 1)


@contextlib.contextmanager
def counted(folder: str, rank: int, world: int) -> Iterator[None]:
    """Meanwhile this rank's default process group is that of a check."""
    if dist.is_initialized():
        dist.destroy_process_group()
    process_group.connect(Path(folder), rank, world, 30.0)
    process_group.LOG.begin()
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
        setattr(distributed_c10d, "ProcessGroupGloo", process_group._GLOO)  # noqa: B010


def both(rank: int, world: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All talks over the group of a check, and over gloo."""
    warnings.simplefilter("ignore")
    theirs = _all(rank, world)
    with counted(folder, rank, world):
        return _all(rank, world), theirs


def _all(rank: int, world: int) -> dict[str, Any]:
    return {name: _text(lambda function=function: function(rank, world)) for name, function in TALKS.items()}


# ------------------------------------------------------------------------------------------- the same as gloo


@talk
def reductions(rank: int, world: int) -> Any:
    found = {}
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND"):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
            x = (_x(rank, 2, 3) % 5).to(dtype)
            found[op, dtype] = _text(lambda x=x, op=op: (dist.all_reduce(x, getattr(dist.ReduceOp, op)), x)[1])
    return found


@talk
def of_one_number_and_of_none(rank: int, world: int) -> Any:
    x, none, into = torch.tensor(1.0 + rank), torch.empty(0), torch.empty(0)
    dist.all_reduce(x)
    dist.all_gather(lists := [torch.zeros(()) for _ in range(world)], torch.tensor(float(rank)))
    dist.all_gather_into_tensor(into, none)
    dist.reduce_scatter_tensor(into, none)
    return x, lists, into


@talk
def to_and_from_a_root(rank: int, world: int) -> Any:
    dist.reduce(x := _x(rank, 3), world - 1)
    dist.broadcast(y := _x(rank, 3), 1)
    dist.gather(_x(rank, 2), lists := [torch.zeros(2) for _ in range(world)] if rank == 1 else None, dst=1)
    dist.scatter(out := torch.zeros(2, 2), [_x(i, 2, 2) for i in range(world)] if rank == 1 else None, src=1)
    return x if rank == world - 1 else None, y, lists, out


@talk
def gathered_and_scattered(rank: int, world: int) -> Any:
    dist.all_gather(lists := [torch.zeros(2) for _ in range(world)], _x(rank, 2))
    dist.all_gather_into_tensor(into := torch.zeros(world, 2), _x(rank, 1, 2))
    dist.reduce_scatter(out := torch.zeros(2, 3), [_x(rank + i, 2, 3) for i in range(world)])
    dist.reduce_scatter_tensor(other := torch.zeros(2), _x(rank, 2 * world), op=dist.ReduceOp.MAX)
    return lists, into, out, other


@talk
def all_to_all(rank: int, world: int) -> Any:
    give, take = [(rank * j + 1) % 3 for j in range(world)], [(i * rank + 1) % 3 for i in range(world)]
    dist.all_to_all_single(out := torch.zeros(sum(take), 4), _x(rank, sum(give), 4), take, give)
    dist.all_to_all(lists := [torch.zeros(3, 2) for _ in range(world)], [_x(rank + j, 3, 2) for j in range(world)])
    return out, lists


@talk
def coalesced(rank: int, world: int) -> Any:
    x, y = _x(rank, 2), _x(rank, 3)
    dist.all_reduce_coalesced([x, _x(rank, 3)])
    dist.all_gather_coalesced(outs := [[torch.zeros(2), torch.zeros(3)] for _ in range(world)], [x, y])
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(z := _x(rank, 3))
    return x, z, outs


@talk
def functionals(rank: int, world: int) -> Any:
    group, x = dist.group.WORLD, _x(rank, 2 * world, 3)
    found = [
        functional.all_reduce(x, "sum", group), functional.all_gather_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group), functional.broadcast(x, 1, group),
        functional.all_to_all_single(x, None, None, group), functional.all_reduce(x, "avg", group),
        *functional.all_reduce_coalesced([x, x + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ]  # fmt: skip
    return [functional.wait_tensor(one) for one in found]


@talk
def differentiated(rank: int, world: int) -> Any:
    x = _x(rank, world, 2).requires_grad_()
    y = differentiable.all_reduce(x * 2) + torch.stack(differentiable.all_gather(x)).sum(0)
    y = y + differentiable.all_to_all_single(torch.zeros(world, 2), x)
    y = y + differentiable.reduce_scatter(torch.zeros(world, 2), [x * i for i in range(world)])
    y = y + differentiable.broadcast(x, 0) + functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)[:world]
    y = y + functional.reduce_scatter_tensor_autograd(x.repeat(world, 1), "sum", 0, dist.group.WORLD)
    y = y + functional.all_to_all_single_autograd(x, [1] * world, [1] * world, dist.group.WORLD)
    (y * _x(rank, world, 2)).sum().backward()
    return y.detach(), x.grad


@talk
def messages(rank: int, world: int) -> Any:
    x, y = _x(rank, 3), torch.zeros(3)
    work = dist.isend(x, (rank + 1) % world)
    dist.recv(y, (rank - 1) % world)
    work.wait()
    ops = [dist.P2POp(dist.isend, y, (rank + 1) % world), dist.P2POp(dist.irecv, x, (rank - 1) % world)]
    [one.wait() for one in dist.batch_isend_irecv(ops)]
    return x, y


@talk
def tags_and_any_source(rank: int, world: int) -> Any:
    if rank == 0:
        [work.wait() for work in [dist.isend(_x(tag, 2), 1, tag=tag) for tag in (5, 7, 7)]]
        found = [torch.zeros(1) for _ in range(1, world)]
        sources = [dist.recv(one, tag=3) for one in found]
        return sorted(zip(sources, [one.item() for one in found], strict=True))
    got = []
    for tag in (7, 5, 7) if rank == 1 else ():
        got.append(torch.zeros(2))
        dist.recv(got[-1], 0, tag=tag)
    dist.send(torch.tensor([float(rank)]), 0, tag=3)
    return got


@talk
def objects(rank: int, world: int) -> Any:
    dist.all_gather_object(found := [None] * world, {"rank": rank, "text": "x" * rank})
    dist.broadcast_object_list(shared := [("a", 1), [2]] if rank == 0 else [None, None], 0)
    dist.scatter_object_list(mine := [None], [f"for {i}" for i in range(world)] if rank == 0 else [None] * world)
    return found, shared, mine


@talk
def groups(rank: int, world: int) -> Any:
    found: list[Any] = []
    last_two = dist.new_group([world - 1, world - 2], backend="gloo")
    alone = [dist.new_group([r]) for r in range(world)][rank]
    halves, _ = dist.new_subgroups(2)
    # On all ranks: torch 2.14 counts these groups too, and ranks with different counts would never meet again.
    local = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    for group in (last_two, alone, halves, local):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        dist.all_reduce(x := _x(rank, 2), group=group)
        dist.all_gather(lists := [torch.zeros(1) for _ in range(group.size())], _x(rank, 1), group=group)
        dist.broadcast(y := _x(rank, 2), group_src=0, group=group)
        found.append((x, lists, y, dist.get_rank(group), dist.get_process_group_ranks(group)))
    if rank >= world - 2:
        other = 2 * world - 3 - rank
        works = [dist.isend(_x(rank, 2), other, group=last_two), dist.irecv(x := _x(0, 2), other, group=last_two)]
        [work.wait() for work in works]
        found.append(x)
    return found


@talk
def meshes(rank: int, world: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    split = distribute_tensor(_x(0, 8, 4), mesh, [Replicate(), Shard(0)])
    y = split @ distribute_tensor(_x(1, 4, 4), mesh, [Replicate(), Replicate()])
    dist.all_reduce(one := torch.ones(1), group=mesh["b"].get_group())
    return y.full_tensor(), y.redistribute(mesh, [Shard(0), Shard(1)]).to_local(), one, mesh.get_coordinate()


@talk
def wrapped_in_ddp(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(_x(rank, 4, 3)).square().mean().backward()
    return [p.grad for p in model.parameters()]


@talk
def strided(rank: int, world: int) -> Any:
    dist.all_reduce(x := _x(rank, 4, 3).t())
    dist.broadcast(y := _x(rank, 4, 3).t(), 0)
    dist.all_gather(outs := [torch.zeros(4, 3).t() for _ in range(world)], _x(rank, 4, 3).t())
    dist.all_gather_into_tensor(into := torch.zeros(3 * world, 4), _x(rank, 4, 3).t())
    dist.reduce_scatter_tensor(out := torch.zeros(2, 3).t(), _x(rank, 2, 3 * world).t())
    alone = _text(lambda: dist.all_to_all_single(torch.zeros(world, 2), _x(rank, 2, world).t()))
    sent = _text(lambda: dist.isend(_x(rank, 4, 3).t(), 1)) if rank == 0 else None
    return x, y, outs, into, out, alone, sent


@talk
def refused(rank: int, world: int) -> Any:
    return [
        _text(lambda: dist.all_gather_into_tensor(torch.zeros(world, 3, 4), torch.ones(3, 4))),
        _text(lambda: dist.all_gather_into_tensor(torch.zeros(world + 1), torch.ones(1))),
        _text(lambda: dist.all_gather([torch.zeros(2), *[torch.zeros(3)] * (world - 1)], torch.ones(2))),
        _text(lambda: dist.send(torch.ones(1), rank)),
        _text(lambda: dist.new_group([0, 0])),
    ]


@talk
def works(rank: int, world: int) -> Any:
    work = dist.all_reduce(x := _x(rank, 2), async_op=True)
    before = work.wait(), work.wait(), work.is_completed(), work.is_success()
    later = dist.all_reduce(y := _x(rank, 2), async_op=True)
    while not later.is_completed():
        pass
    future = dist.all_reduce(z := _x(rank, 2), async_op=True).get_future()
    chained = future.then(lambda done: done.value()[0] + 1)
    return before, x, y.clone(), [one.clone() for one in future.wait()], chained.wait(), z


@talk
def barriers_and_the_store(rank: int, world: int) -> Any:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    there = distributed_c10d._get_default_store()
    if rank == 0:
        there.set("word", "hello")
    there.wait(["word"])
    return there.get("word"), dist.get_backend(), dist.get_rank(), dist.get_world_size(), dist.get_backend_config()


@talk
def by_threads(rank: int, world: int) -> Any:
    group = [dist.new_group() for _ in range(2)]

    def sums(which: int) -> torch.Tensor:
        total = torch.zeros(2)
        for i in range(5):
            dist.all_reduce(x := _x(rank + which + i, 2), group=group[which])
            total += x
        return total

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sums, range(2)))


@talk
def inside_a_graph(rank: int, world: int) -> Any:
    """In place on what autograd has saved: gloo does not tell autograd."""
    y = (x := _x(rank, 3).requires_grad_()).exp()
    dist.all_reduce(y.detach())
    y.sum().backward()
    return x.grad


@pytest.mark.parametrize("world", mostly_thorough([2, 4], [1]))
def test_it_is_as_over_gloo(pools: Callable[..., WarmPool], tmp_path: Path, world: int) -> None:
    for rank, (ours, theirs) in enumerate(pools(world).run(both, str(tmp_path), timeout=120)):
        for name in TALKS:
            _equal(ours[name], theirs[name], f"{name} on rank {rank}")


def test_torch_may_make_a_group_with_more_options_and_tell_it_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 does, and 2.13 does not."""
    given, gloo = dict[str, Any](), process_group._GLOO

    def later(store: Any, rank: int, size: int, timeout: timedelta, **options: Any) -> Any:
        given.update(options)
        return gloo(store, rank, size, timeout=timeout)

    monkeypatch.setattr(process_group, "_GLOO", later)
    monkeypatch.setattr(process_group, "LOG", process_group.Log())
    group = process_group.CountedGroup(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60), enable_reconfigure=False)
    group.options.global_ranks_in_group, group.options.group_name = [3], "7"
    group.allreduce([torch.ones(2)]).wait()
    assert given == {"enable_reconfigure": False} and group.group_name == "7"
    assert [call.group for call in process_group.LOG.calls] == [(3,)]


def test_gloo_is_found_before_a_check_closes_the_folders_of_torch() -> None:
    """As torch 2.14 finds it: among the files of its installation, when the first group is made."""
    program = (
        "from torch.distributed.distributed_c10d import Backend; seen = []\n"
        "Backend._ensure_backend_registered = seen.append\n"
        "import labkit.process_group; print(seen)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "['gloo']"


def _equal(one: Any, other: Any, where: str) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor), f"{where}: {one}"
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, msg=f"{where}: {one} {other}")
    elif isinstance(other, list | tuple):
        assert isinstance(one, list | tuple) and len(one) == len(other), f"{where}: {one} {other}"
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            _equal(a, b, f"{where}[{i}]")
    elif isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in other:
            _equal(one[key], other[key], f"{where}[{key!r}]")
    else:
        assert one == other, f"{where}: {one} {other}"


# --------------------------------------------------------------------------------------------------- the log


def logged(rank: int, world: int, folder: str, name: str) -> Any:
    (place := Path(folder, name)).mkdir(exist_ok=True)
    with counted(str(place), rank, world):
        value = globals()[name](rank, world)
        return value, list(process_group.LOG.calls), list(process_group.LOG.marks)


@pytest.fixture
def log(pools: Callable[..., WarmPool], tmp_path: Path) -> Callable[..., list[Any]]:
    """`log(function)`: (its value, calls, marks) by rank."""
    return lambda function, world=2: list(pools(world).run(logged, str(tmp_path), function.__name__, timeout=60))


def says_all(rank: int, world: int) -> None:
    x, out = torch.ones(4), torch.empty(4 * world)
    dist.all_reduce(x)
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    dist.all_gather_into_tensor(out, x)
    dist.reduce_scatter_tensor(x, out)
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    dist.scatter(x, [x, x] if rank == 1 else None, src=1)
    dist.gather(x, [x, x] if rank == 1 else None, dst=1)
    functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    dist.barrier()


def test_each_communication_has_its_name_and_its_bytes(log: Callable[..., list[Any]]) -> None:
    first, second = (calls for _, calls, _ in log(says_all))
    assert [(c.name, c.sent, c.received, c.peer) for c in first] == [
        ("all_reduce", 16, 16, -1), ("send", 16, 0, 1), ("all_gather", 16, 32, -1), ("reduce_scatter", 32, 16, -1),
        ("all_to_all", 16, 16, -1), ("broadcast", 16, 0, -1), ("reduce", 16, 0, -1), ("scatter", 0, 16, -1),
        ("gather", 16, 0, -1), ("all_reduce", 16, 16, -1), ("barrier", 0, 0, -1),
    ]  # fmt: skip
    assert [(c.name, c.sent, c.received, c.peer) for c in second if c.name != "barrier"][1:] == [
        ("recv", 0, 16, 0), ("all_gather", 16, 32, -1), ("reduce_scatter", 32, 16, -1), ("all_to_all", 16, 16, -1),
        ("broadcast", 0, 16, -1), ("reduce", 16, 16, -1), ("scatter", 32, 16, -1), ("gather", 16, 32, -1),
        ("all_reduce", 16, 16, -1),
    ]  # fmt: skip
    assert all(c.nbytes == max(c.sent, c.received) and c.group == (0, 1) for c in first + second)
    assert all(c.waited is not None and c.waited > c.started for c in first + second), "each was waited for"


def in_groups(rank: int, world: int) -> None:
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = pairs[rank in (1, 2)]
    dist.all_reduce(torch.ones(1), group=mine)
    if rank == 3:
        dist.send(torch.ones(2), 0, group=mine)
        dist.recv(torch.ones(2), 0, group=mine)
    if rank == 0:
        dist.recv(torch.ones(2), group=mine)
        dist.send(torch.ones(2), 3, group=mine)


def test_peers_and_groups_are_places_in_the_case(log: Callable[..., list[Any]]) -> None:
    calls = [calls for _, calls, _ in log(in_groups, 4)]
    assert [calls[rank][0].group for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert (calls[0][1].name, calls[0][1].peer) == ("recv", 3), "from any source: known afterwards"
    assert [(call.name, call.peer) for call in calls[0][2:3] + calls[3][1:3]] == [("send", 3), ("send", 0), ("recv", 0)]
    process_group.LOG.calls = calls[3]
    try:
        placed = process_group.LOG.placed([3, 1, 0])
    finally:
        process_group.LOG.begin()
    assert [(call.group, call.peer) for call in placed] == [((2, 0), -1), ((2, 0), 2), ((2, 0), 2)], (
        "and of a case's members"
    )


def starts_and_waits(rank: int, world: int) -> list[Any]:
    """What a program reads before it waits is old; what it writes after the start does not travel."""
    with OpRecorder(rank) as recorder:
        process_group.LOG.begin(lambda: recorder.ops)
        never = dist.all_reduce(torch.ones(4), async_op=True)
        work = dist.all_reduce(x := torch.ones(2), async_op=True)
        x @ x
        early = x.tolist()
        x.fill_(100.0)
        dist.barrier()  # all have arrived: gloo has the result
        late = x.tolist()
        process_group.mark("between")
        work.wait()
        first = process_group.LOG.calls[1].waited
        work.wait()
    del never
    evidence = recorder.evidence().with_calls(process_group.LOG.calls, process_group.LOG.marks)
    return [early, late, x.tolist(), first == process_group.LOG.calls[1].waited, evidence.to_plain()]


def test_results_come_with_the_first_wait(log: Callable[..., list[Any]]) -> None:
    for rank, ((early, late, waited, once, evidence), calls, [(text, time)]) in enumerate(log(starts_and_waits)):
        assert (early, late, waited, once) == ([1.0, 1.0], [100.0, 100.0], [2.0, 2.0], True), rank
        never, work = calls[:2]
        assert never.waited is None and work.started < time < work.waited and text == "between"
        steps = [what for what, _ in Evidence.from_plain(evidence).order]
        assert steps == ["all_reduce", "all_reduce", "matmul", "barrier", "wait", "wait"]


def sends_and_overwrites(rank: int, world: int) -> list[float]:
    x = torch.full((2,), 1.0 + rank)
    if rank == 0:
        work = dist.isend(x, 1)
        x.fill_(9.0)
        dist.barrier()  # gloo sends when the other receives, which is after this
        work.wait()
    else:
        dist.barrier()
        dist.recv(x, 0)
    return x.tolist()


def test_what_is_written_after_the_start_does_not_travel(log: Callable[..., list[Any]]) -> None:
    assert [value for value, _, _ in log(sends_and_overwrites)] == [[9.0, 9.0], [1.0, 1.0]]


def overwrites(rank: int, world: int) -> None:
    both, into = torch.ones(4), torch.empty(1)
    for half, numbers in ((slice(2), 1.0), (slice(2), 5.0), (slice(2, 4), 5.0)):
        work = dist.reduce_scatter_tensor(into, both[:2], async_op=True)
        both[half] = numbers
        work.wait()


def test_it_is_noted_where_other_numbers_stand_in_what_is_sent(log: Callable[..., list[Any]]) -> None:
    """Not where the same are written, nor where another part of the same memory is."""
    assert [[call.overwritten for call in calls] for _, calls, _ in log(overwrites)] == [[False, True, False]] * 2


def futures(rank: int, world: int) -> list[Any]:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    future = work.get_future()
    unwaited = process_group.LOG.calls[0].waited
    return [unwaited, [one.tolist() for one in future.wait()], future is work.get_future()]


def chained(rank: int, world: int) -> list[Any]:
    futures = [dist.all_reduce(torch.ones(2), async_op=True).get_future() for _ in range(2)]
    doubled, failing = futures[0].then(lambda done: 2 * done.value()[0]), futures[1].then(lambda done: 1 // 0)
    return [process_group.LOG.calls[0].waited, doubled.wait().tolist(), _failure(failing.wait)]


def _failure(function: Callable[[], Any]) -> str:
    try:
        return str(function())
    except Exception as error:
        return type(error).__name__


def read(rank: int, world: int) -> list[float]:
    return plain.settled(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)).tolist()


def completed(rank: int, world: int) -> list[float]:
    work = dist.all_reduce(x := torch.ones(2), async_op=True)
    while not work.is_completed():
        pass
    return x.tolist()


def test_a_future_and_a_look_count_as_waits(log: Callable[..., list[Any]]) -> None:
    for value, calls, _ in log(futures):
        assert value == [None, [[2.0, 2.0]], True] and calls[0].waited is not None
    for value, calls, _ in log(chained):
        assert value == [None, [4.0, 4.0], "ZeroDivisionError"]
        assert all(call.waited is not None for call in calls[:2])
    for function in (completed, read):
        for value, calls, _ in log(function):
            assert value == [2.0, 2.0] and calls[0].waited is not None


def called_back(rank: int, world: int) -> list[Any]:
    """The callback runs when the message arrives, and asks the future itself."""
    future, ran = dist.all_reduce(torch.ones(2), async_op=True).get_future(), threading.Event()

    def back(_: Any) -> Any:
        value = future.wait()[0].tolist()
        ran.set()
        return value

    after = future.then(back)
    arrived = ran.wait(20)
    return [arrived, process_group.LOG.calls[0].waited, after.wait()]


def test_a_callback_that_asks_its_own_future_is_no_wait(log: Callable[..., list[Any]]) -> None:
    """When it runs depends on the machine; the program waits where it waits for what the callback makes."""
    for value, calls, _ in log(called_back):
        assert value == [True, None, [2.0, 2.0]] and calls[0].waited is not None


def test_a_wait_returns_when_the_results_are_there_though_another_thread_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Done:
        def wait(self) -> bool:
            return True

    begun = threading.Event()

    @contextlib.contextmanager
    def late() -> Iterator[None]:  # the thread of a callback stands still before it copies
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            sleep(0.3)
        yield

    monkeypatch.setattr(process_group, "_disable_current_modes", late)
    x = torch.zeros(2)
    work = process_group.CountedWork(Done(), dataclasses.replace(_CALL), [x], [torch.ones(2)], (0, 1), [])
    thread = threading.Thread(target=work._collect)
    thread.start()
    begun.wait(20)
    work.wait()
    assert x.tolist() == [1.0, 1.0]
    thread.join()


def too_many(rank: int, world: int) -> str:
    process_group.LOG.calls = [dataclasses.replace(_CALL) for _ in range(process_group.MAX_CALLS)]
    try:
        return str(_text(lambda: dist.all_reduce(torch.ones(1))))
    finally:
        process_group.LOG.begin()


_CALL = process_group.Call("send", 0, 0, 0)


def test_a_log_has_a_limit(log: Callable[..., list[Any]]) -> None:
    assert [value for value, _, _ in log(too_many)] == ["RuntimeError: more than 50,000 communications of one rank"] * 2
