"""What ranks say to each other in the tests of the transport: each function of `TALKS` runs on gloo and on ours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

Talk = Callable[[int, int], Any]
TALKS: dict[str, Talk] = {}
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.bool,
]  # fmt: skip
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def talk(function: Talk) -> Talk:
    TALKS[function.__name__] = function
    return function


def every(rank: int, world: int) -> dict[str, Any]:
    """All talks, one after the other; an error as its text."""
    found: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for name, function in TALKS.items():
        torch.manual_seed(rank)
        try:
            found[name] = function(rank, world)
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def _text(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _x(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * (rank + 1)


@talk
def reductions(rank: int, world: int) -> Any:
    found = {}
    for op in OPS:
        for dtype in [*DTYPES, torch.int16, torch.float8_e4m3fn]:
            x = (_x(rank, 2, 3) % 5).to(dtype)
            found[op, str(dtype)] = _text(lambda x=x, op=op: (dist.all_reduce(x, getattr(dist.ReduceOp, op)), x)[1])
    return found


@talk
def nan_of_one_rank(rank: int, world: int) -> Any:
    """MAX and MIN of one number keep the first rank's NaN and lose that of any other."""
    found = {}
    for op in ("MAX", "MIN"):
        for who in range(world):
            x = torch.tensor([torch.nan if rank == who else float(rank)])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found[op, who] = x.isnan().tolist()
    return found


@talk
def of_no_numbers(rank: int, world: int) -> Any:
    x, out = torch.empty(0), torch.empty(0)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(out, x)
    dist.reduce_scatter_tensor(out, x)
    dist.all_to_all_single(out, x)
    dist.broadcast(x, 0)
    return x, out


@talk
def all_to_all_into_a_view(rank: int, world: int) -> Any:
    """The numbers go where the view's memory lies, not where its strides say."""
    out = torch.zeros(3, 2 * world).t()
    dist.all_to_all_single(out, _x(rank, 2 * world, 3))
    return out.contiguous()


@talk
def of_one_number(rank: int, world: int) -> Any:
    x = torch.tensor(1.0 + rank)
    dist.all_reduce(x)
    lists = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(lists, torch.tensor(float(rank)))
    return x, lists


@talk
def moves_of_every_dtype(rank: int, world: int) -> Any:
    found = {}
    for dtype in [*DTYPES, torch.int16]:
        x = _x(rank, world, 2).to(dtype)
        out = [torch.zeros_like(x) for _ in range(world)]
        found[dtype, "all_gather"] = _text(lambda out=out, x=x: (dist.all_gather(out, x), out)[1])
        y = x.clone()
        found[dtype, "broadcast"] = _text(lambda y=y: (dist.broadcast(y, world - 1), y)[1])
        z = torch.zeros_like(x)
        found[dtype, "all_to_all"] = _text(lambda z=z, x=x: (dist.all_to_all_single(z, x), z)[1])
        flat = torch.zeros(world * world, 2, dtype=dtype)
        found[dtype, "into"] = _text(lambda flat=flat, x=x: (dist.all_gather_into_tensor(flat, x), flat)[1])
        if rank < 2:
            found[dtype, "send"] = (dist.send if rank == 0 else dist.recv)(x, 1 - rank), x
    return found


@talk
def to_a_root(rank: int, world: int) -> Any:
    x = _x(rank, 3)
    dist.reduce(x, world - 1)
    lists = [torch.zeros(2) for _ in range(world)] if rank == 1 else None
    dist.gather(_x(rank, 2), lists, dst=1)
    out = torch.zeros(2, 2)
    dist.scatter(out, [_x(i, 2, 2) for i in range(world)] if rank == 1 else None, src=1)
    return x if rank == world - 1 else None, lists, out


@talk
def scattered(rank: int, world: int) -> Any:
    out, other = torch.zeros(2, 3), torch.zeros(2)
    dist.reduce_scatter(out, [_x(rank + i, 2, 3) for i in range(world)])
    dist.reduce_scatter_tensor(other, _x(rank, 2 * world), op=dist.ReduceOp.MAX)
    return out, other


@talk
def all_to_all(rank: int, world: int) -> Any:
    give = [(rank * j + 1) % 3 for j in range(world)]
    take = [(i * rank + 1) % 3 for i in range(world)]
    out = torch.zeros(sum(take), 4)
    dist.all_to_all_single(out, _x(rank, sum(give), 4), take, give)
    lists = [torch.zeros(3, 2) for _ in range(world)]
    dist.all_to_all(lists, [_x(rank + j, 3, 2) for j in range(world)])
    uneven = _text(lambda: dist.all_to_all([torch.zeros(n + 1) for n in range(world)], [torch.zeros(1)] * world))
    return out, lists, uneven


@talk
def nothing_to_a_rank(rank: int, world: int) -> Any:
    give = [5 if j == 0 else 0 for j in range(world)]
    take = [5 if rank == 0 else 0] * world
    out = torch.zeros(sum(take), 2, dtype=torch.int64)
    dist.all_to_all_single(out, _x(rank, 5, 2).long(), take, give)
    return out


@talk
def coalesced(rank: int, world: int) -> Any:
    x, y = _x(rank, 2), _x(rank, 3)
    dist.all_reduce_coalesced([x, _x(rank, 3)])
    outs = [[torch.zeros(2), torch.zeros(3)] for _ in range(world)]
    dist.all_gather_coalesced(outs, [x, y])
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(z := _x(rank, 3))
    return x, z, outs


@talk
def functionals(rank: int, world: int) -> Any:
    group = dist.group.WORLD
    x = _x(rank, 2 * world, 3)
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
    y = differentiable.all_reduce(x * 2)
    y = y + torch.stack(differentiable.all_gather(x)).sum(0)
    y = y + differentiable.all_to_all_single(torch.zeros(world, 2), x)
    y = y + torch.cat(list(differentiable.all_to_all([torch.zeros(1, 2) for _ in range(world)], list(x.split(1)))))
    y = y + differentiable.reduce_scatter(torch.zeros(world, 2), [x * i for i in range(world)])
    y = y + differentiable.broadcast(x, 0)
    y = y + functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)[:world]
    y = y + functional.reduce_scatter_tensor_autograd(x.repeat(world, 1), "sum", 0, dist.group.WORLD)
    y = y + functional.all_to_all_single_autograd(x, [1] * world, [1] * world, dist.group.WORLD)
    (y * _x(rank, world, 2)).sum().backward()
    return y.detach(), x.grad


@talk
def ring_of_messages(rank: int, world: int) -> Any:
    x, y = _x(rank, 3), torch.zeros(3)
    work = dist.isend(x, (rank + 1) % world)
    dist.recv(y, (rank - 1) % world)
    work.wait()
    ops = [dist.P2POp(dist.isend, y, (rank + 1) % world), dist.P2POp(dist.irecv, x, (rank - 1) % world)]
    for one in dist.batch_isend_irecv(ops):
        one.wait()
    return x, y


@talk
def tags_and_any_source(rank: int, world: int) -> Any:
    if rank == 0:
        sent = [dist.isend(_x(tag, 2), 1, tag=tag) for tag in (5, 7, 7)]
        [work.wait() for work in sent]
        found = [torch.zeros(1) for _ in range(1, world)]
        sources = [dist.recv(one, tag=3) for one in found]
        return sorted(zip(sources, [one.item() for one in found], strict=True))
    got = []
    if rank == 1:
        for tag in (7, 5, 7):
            got.append(torch.zeros(2))
            dist.recv(got[-1], 0, tag=tag)
    dist.send(torch.tensor([float(rank)]), 0, tag=3)
    return got


@talk
def objects(rank: int, world: int) -> Any:
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    shared = [("a", 1), [2]] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object((rank,), gathered)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(world)] if rank == 0 else [None] * world)
    if rank == 0:
        dist.send_object_list(["hello"], 1)
    elif rank == 1:
        dist.recv_object_list(mine2 := [None], 0)
        mine += mine2
    return found, shared, gathered, mine


@talk
def barriers(rank: int, world: int) -> Any:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    return (
        dist.get_backend(),
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_backend_config(),
        dist.group.WORLD.name(),
    )


@talk
def groups(rank: int, world: int) -> Any:
    found: list[Any] = []
    last_two = dist.new_group([world - 1, world - 2], backend="gloo")
    mine = [dist.new_group([r]) for r in range(world)][rank]
    backwards = dist.new_group(list(range(world))[::-1], sort_ranks=False) if world == 2 else dist.new_group()
    halves, _ = dist.new_subgroups(2) if world % 2 == 0 else (mine, None)
    local = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else mine
    for group in (last_two, mine, backwards, halves, local):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            found.append(None)
            continue
        x = _x(rank, 2)
        dist.all_reduce(x, group=group)
        lists = [torch.zeros(1) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lists, torch.tensor([float(rank)]), group=group)
        dist.broadcast(y := _x(rank, 2), group_src=0, group=group)
        found.append((x, lists, y, dist.get_rank(group), dist.get_process_group_ranks(group)))
    if rank >= world - 2:
        x = _x(rank, 2)
        other = 2 * world - 3 - rank
        works = [dist.isend(x.clone(), other, group=last_two), dist.irecv(x, other, group=last_two)]
        [work.wait() for work in works]
        found.append(x)
    return found


@talk
def meshes(rank: int, world: int) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    x = _x(0, 8, 4)
    split = distribute_tensor(x, mesh, [Replicate(), Shard(0)])
    weight = distribute_tensor(_x(1, 4, 4), mesh, [Replicate(), Replicate()])
    y = split @ weight
    assert isinstance(y, DTensor)
    found = y.full_tensor(), y.redistribute(mesh, [Shard(0), Shard(1)]).to_local(), (y.sum() + 0).full_tensor()
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh["b"].get_group())
    return found, one, mesh.get_coordinate()


@talk
def wrapped_in_ddp(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(_x(rank, 4, 3)).square().mean().backward()
    return [p.grad for p in model.parameters()]


@talk
def strided(rank: int, world: int) -> Any:
    x = _x(rank, 4, 3).t()
    dist.all_reduce(x)
    dist.broadcast(y := _x(rank, 4, 3).t(), 0)
    outs = [torch.zeros(4, 3).t() for _ in range(world)]
    dist.all_gather(outs, _x(rank, 4, 3).t())
    into = torch.zeros(3 * world, 4)
    dist.all_gather_into_tensor(into, _x(rank, 4, 3).t())
    out = torch.zeros(2, 3).t()
    dist.reduce_scatter_tensor(out, _x(rank, 2, 3 * world).t())
    lists = [torch.zeros(4, 3).t() for _ in range(world)] if rank == 0 else None
    dist.gather(_x(rank, 4, 3).t(), lists)
    dist.scatter(one := torch.zeros(4, 3).t(), [_x(i, 4, 3).t() for i in range(world)] if rank == 0 else None)
    alone = _text(lambda: dist.all_to_all_single(torch.zeros(world, 2), _x(rank, 2, world).t()))
    sent = _text(lambda: dist.isend(_x(rank, 4, 3).t(), 1)) if rank == 0 else None
    return x, y, outs, into, out, lists, one, alone, sent


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
    x = _x(rank, 2)
    work = dist.all_reduce(x, async_op=True)
    before = work.wait(), work.wait(), work.is_completed()
    later = dist.all_reduce(y := _x(rank, 2), async_op=True)
    while not later.is_completed():
        pass
    future = dist.all_reduce(z := _x(rank, 2), async_op=True).get_future()
    chained = future.then(lambda done: done.value()[0] + 1)
    return before, work.result(), y.clone(), [one.clone() for one in future.wait()], chained.wait(), z


@talk
def store(rank: int, world: int) -> Any:
    there = dist.distributed_c10d._get_default_store()
    if rank == 0:
        there.set("word", "hello")
    there.wait(["word"])
    total = there.add("count", rank + 1)
    dist.barrier()
    return there.get("word"), total > 0, there.add("count", 0), there.check(["word"]), there.check(["nothing"])


@talk
def by_threads(rank: int, world: int) -> Any:
    from concurrent.futures import ThreadPoolExecutor

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
    x = _x(rank, 3).requires_grad_()
    y = x.exp()
    dist.all_reduce(y.detach())  # in place on what autograd has saved: gloo does not tell autograd
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
    return x.grad


# ------------------------------------------------------------------------------- what goes wrong, by name

WRONG: dict[str, Callable[[int], Any]] = {}


def wrong(function: Callable[[int], Any]) -> Callable[[int], Any]:
    WRONG[function.__name__] = function
    return function


def one_wrong(rank: int, world: int, name: str) -> Any:
    return WRONG[name](rank)


@wrong
def other_collective(rank: int) -> None:
    dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0)


@wrong
def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank, 2))


@wrong
def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.float64)[rank]))


@wrong
def rows_beside_counts(rank: int) -> None:
    dtype, gives = ((torch.int64, [1, 1]), (torch.float32, [2, 0]))[rank]
    dist.all_to_all_single(torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype), gives, gives)


@wrong
def other_operation(rank: int) -> None:
    dist.barrier()
    dist.all_reduce(torch.ones(4), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])


@wrong
def other_root(rank: int) -> None:
    dist.broadcast(torch.ones(4), rank)


@wrong
def splits_that_differ(rank: int) -> None:
    give, take = ([1, 2], [1, 1]), ([1, 2], [1, 1])
    dist.all_to_all_single(torch.zeros(sum(take[rank]), 3), torch.ones(sum(give[rank]), 3), take[rank], give[rank])


@wrong
def other_groups(rank: int) -> None:
    dist.new_group([[0, 1], [0]][rank] if rank == 0 else [1, 0], sort_ranks=rank == 0)


@wrong
def small_buffer(rank: int) -> None:
    dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(2), 0)


@wrong
def all_send_first(rank: int) -> None:
    dist.send(torch.ones(4), 1 - rank)
    dist.recv(torch.ones(4), 1 - rank)


@wrong
def other_order(rank: int) -> None:
    pair = dist.new_group([0, 1])
    for group in (None, pair) if rank == 0 else (pair, None):
        dist.all_reduce(torch.ones(1), group=group)


@wrong
def returns_early(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(1), 1)


@wrong
def dies(rank: int) -> None:
    import os

    if rank == 1:
        torch.save("died", os.devnull)
        raise ValueError("my own fault")
    dist.all_reduce(torch.ones(1))


@wrong
def other_tag(rank: int) -> None:
    work = dist.isend(torch.ones(2), 1, tag=3) if rank == 0 else dist.irecv(torch.ones(2), 0, tag=4)
    assert work is not None
    work.wait()


@wrong
def waits_for_a_key(rank: int) -> None:
    dist.distributed_c10d._get_default_store().get("never") if rank == 0 else dist.barrier()


@wrong
def short_timeout(rank: int) -> None:
    import time

    if rank == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=0.3))
    time.sleep(1.0)


def small_messages(rank: int, world: int) -> None:
    for numbers, tag in ((1, 0), (1, 3), (3, 3), (0, 0)):
        if rank == 0:
            dist.send(torch.ones(numbers), 1, tag=tag)
        else:
            dist.recv(torch.empty(numbers), 0, tag=tag)


def computes_long(rank: int, world: int) -> float:
    """A rank that computes, sleeps, or sends from a thread is in no deadlock."""
    import threading
    import time

    x = torch.zeros(1)
    if rank == 0:
        dist.recv(x, 1)
        thread = threading.Thread(target=lambda: (time.sleep(1.5), dist.send(x + 1, 1)))
        thread.start()
        dist.recv(y := torch.zeros(1), 1)
        thread.join()
        return float(y)
    time.sleep(1.5)
    dist.send(x + 1, 0)
    dist.recv(y := torch.zeros(1), 0)
    dist.send(y + 1, 0)
    return float(y)


def three_in_a_row(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    elif rank == 1:
        dist.recv(torch.ones(1), 2)
    else:
        dist.recv(torch.ones(1))


def exchanged(rank: int, world: int, counts: list[list[int]]) -> torch.Tensor:
    give, take = counts[rank], [row[rank] for row in counts]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + j) for j, n in enumerate(give)])
    dist.all_to_all_single(out := torch.zeros(sum(take), 2), x, take, give)
    return out


def starts_and_waits(rank: int, world: int) -> None:
    from labkit.transport_group import mark

    never = dist.all_reduce(torch.ones(4), async_op=True)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    mark("between")
    work.wait()
    work.wait()
    if rank == 0:
        dist.isend(torch.ones(3), 1, tag=9)
    dist.isend(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1))
    del never


def own_frames(rank: int, world: int) -> list[str]:
    """Messages of a rank's own making: none is believed, and none ends the broker."""
    from labkit.transport_group import Link

    line, found = Link.line, []
    assert line is not None
    base = {"to": "transport"}
    x = torch.ones(4)
    asked: list[tuple[dict[str, Any], list[torch.Tensor]]] = [
        ({"do": "nothing"}, []), ({}, []), ({"do": ["wait"]}, []), ({"do": "wait", "work": 10**6}, []),
        ({"do": "wait", "work": [1]}, []), ({"do": "wait"}, []), ({"do": "group", "name": "a", "ranks": [0, 99]}, []),
        ({"do": "group", "name": "a", "ranks": "01"}, []), ({"do": "group", "name": "a", "ranks": [1 - rank]}, []),
        ({"do": "group", "name": "a", "ranks": [rank, rank]}, []), ({"do": "test", "work": -1}, []),
        ({"do": "keys", "verb": "burn", "names": []}, []), ({"do": "keys", "verb": "set", "names": []}, []),
        ({"do": "keys", "verb": "get", "names": 7}, []), ({"do": "wait", "work": 0, "threads": -5}, []),
    ]  # fmt: skip
    for header, tensors in asked:
        found.append(_text(lambda header=header, tensors=tensors: line.ask({**base, **header}, tensors)[0]))
    starts: list[tuple[dict[str, Any], list[torch.Tensor]]] = [
        ({"op": "all_reduce", "reduce": "sum", "units": [["float32", 4]]}, []),
        ({"op": "all_reduce", "reduce": "sum", "units": [["float32", 1 << 40]]}, [x]),
        ({"op": "all_reduce", "reduce": "sum", "units": [["float32", -4]]}, [x]),
        ({"op": "all_reduce", "reduce": "steal", "units": [["float32", 4]]}, [x]),
        ({"op": "all_reduce", "reduce": "sum", "units": [["object", 4]]}, [x]),
        ({"op": "broadcast", "root": 7, "units": [["float32", 4]]}, [x]),
        ({"op": "all_to_all", "units": [["float32", 1]], "give": [1], "take": [1]}, [x]),
        ({"op": "all_to_all", "units": [["float32", 1 << 31]], "give": [1 << 31] * 2, "take": [0, 4]}, [x]),
        ({"op": "all_to_all", "units": [], "give": [2, 2], "take": [2, 2]}, []),
        ({"op": "barrier"}, [x]), ({"op": "send", "peer": 9}, [x]), ({"op": "send", "peer": -1}, [x]),
        ({"op": "send", "peer": 1 - rank}, []), ({"op": "recv", "peer": 1 - rank, "nbytes": "16"}, []),
        ({"op": "all_reduce", "reduce": "sum", "units": [["float32", 4]], "group": "9"}, [x]), ({}, []),
    ]  # fmt: skip
    for header, tensors in starts:
        number = line.tell({**base, "do": "start", "group": "0", **header}, tensors)
        found.append(_text(lambda number=number: line.ask({**base, "do": "wait", "work": number})[0]))
    dist.all_reduce(x)
    assert x.tolist() == [world] * 4, "the others' calls are untouched"
    return [str(one) for one in found]


def never_waits(rank: int, world: int) -> str:
    """More bytes than a rank may leave with the broker."""
    x = torch.zeros(15_000_000, dtype=torch.uint8)
    works = [dist.isend(x, 1 - rank) for _ in range(20)]
    return str(_text(lambda: works[-1].wait() if works[-1] else None)) if rank == 0 else ""
