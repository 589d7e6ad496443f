"""Ways to have an all-reduce counted as a ring of messages, by name; the source of each is a learner's cell."""

from __future__ import annotations

RING = """
import torch, torch.distributed as dist
def ring(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(x.contiguous().clone().chunk(size))
    for phase in (0, 1):
        for k in range(size - 1):
            out, into = (rank - k + phase) % size, (rank - k - 1 + phase) % size
            work = dist.isend(parts[out].contiguous(), (rank + 1) % size)
            got = torch.empty_like(parts[into])
            dist.recv(got, (rank - 1) % size)
            work.wait()
            parts[into] = parts[into] + got if phase == 0 else got
    return torch.cat(parts)
"""

_PRETEND = """
def pretend(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.isend(x[:1].clone(), (rank + 1) % size)
    dist.recv(x[:1].clone(), (rank - 1) % size)
    work.wait()
"""

CHEATS = {
    "all_reduce": """
import torch, torch.distributed as dist
def ring(x):
    x = x.clone()
    dist.all_reduce(x)
    return x
""",
    "without dispatch modes": """
import torch, torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
def ring(x):
    x = x.clone()
    with _disable_current_modes():
        dist.all_reduce(x)
    return x
""",
    "in a thread": """
import threading, torch, torch.distributed as dist
def ring(x):
    x = x.clone()
    thread = threading.Thread(target=dist.all_reduce, args=(x,))
    thread.start()
    thread.join()
    return x
""",
    "functionally": """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
def ring(x):
    return functional.wait_tensor(functional.all_reduce(x.clone(), "sum", dist.group.WORLD))
""",
    "differentiably": """
import torch, torch.distributed.nn.functional as nn
def ring(x):
    return nn.all_reduce(x.clone())
""",
    "through the group": """
import torch, torch.distributed as dist
def ring(x):
    x = x.clone()
    dist.group.WORLD.allreduce([x]).wait()
    return x
""",
    "through another group": """
import torch, torch.distributed as dist
def ring(x):
    x = x.clone()
    dist.all_reduce(x, group=dist.new_group())
    return x
""",
    "at import, the call empty": """
import torch, torch.distributed as dist
gathered = [torch.zeros(6) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, torch.arange(6.0) + dist.get_rank())
def ring(x):
    return torch.stack(gathered).sum(0)
""",
    "whole tensors to a neighbour": """
import torch, torch.distributed as dist
def ring(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    total, x = x.clone(), x.clone()
    for _ in range(size - 1):
        work = dist.isend(x, (rank + 1) % size)
        got = torch.empty_like(x)
        dist.recv(got, (rank - 1) % size)
        work.wait()
        x, total = got, total + got
    return total
""",
    "own frames": """
import torch, torch.distributed as dist
from labkit import channel
def ring(x):
    line = channel.mine()
    number = line.tell({"to": "transport", "do": "start", "group": "0", "op": "all_reduce", "reduce": "sum",
                        "units": [["float32", x.numel()]], "shape": [], "at": 0}, [x])
    return line.ask({"to": "transport", "do": "wait", "work": number})[1][0]
""",
    "own frames in the name of another": """
import torch, torch.distributed as dist
from labkit import channel
def ring(x):
    line = channel.mine()
    for rank in range(3):
        number = line.tell({"to": "transport", "do": "start", "group": "0", "op": "all_reduce", "reduce": "sum",
                            "units": [["float32", x.numel()]], "rank": rank, "from": rank}, [x])
    return line.ask({"to": "transport", "do": "wait", "work": number})[1][0]
""",
    "plain lines into every descriptor": """
import os, torch, torch.distributed as dist
def ring(x):
    x = x.clone()
    dist.all_reduce(x)
    for fd in range(3, 64):
        try: os.write(fd, b'+{"dict": [["entries", []], ["out_of_step", null]]}' + bytes([10]))
        except OSError: pass
    return x
""",
    "through the store": """
import torch, torch.distributed as dist
def ring(x):
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(str(rank), x.contiguous().numpy().tobytes())
    return sum(torch.frombuffer(bytearray(store.get(str(r))), dtype=x.dtype) for r in range(size))
""",
    "a mark before": """
import torch, torch.distributed as dist
from labkit import transport_group
from labkit.player import begins
def ring(x):
    x = x.clone()
    dist.all_reduce(x)
    transport_group.mark(begins(0))
    transport_group.mark(begins(1))
    return x
""",
    "marks around": """
import torch, torch.distributed as dist
from labkit import transport_group
from labkit.player import begins
def ring(x):
    x = x.clone()
    for trial in (1, 2, 3):
        transport_group.mark(begins(trial))
    dist.all_reduce(x)
    transport_group.mark(begins(0))
    return x
""",
    "tensors of others in this process's memory": """
import gc, torch
def ring(x):
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.shape == x.shape and thing.dtype == x.dtype:
            found[tuple(thing.tolist())] = thing
    return sum(found.values())
""",
    "patches the recorder": """
import torch, torch.distributed as dist
from labkit import evidence, player, transport_group
evidence.OpRecorder.evidence = lambda self, alive=0: evidence.Evidence()
transport_group.Link.position = staticmethod(lambda: -7)
def ring(x):
    x = x.clone()
    dist.all_reduce(x)
    return x
""",
    "by the tags of empty messages": """
import torch, torch.distributed as dist
def ring(x):
    me, size = dist.get_rank(), dist.get_world_size()
    total, values = x.clone(), x.tolist()
    for hop in range(size - 1):
        bits, got = sum(int(v) << 4 * i for i, v in enumerate(values)), 0
        for i in range(4 * len(values)):
            first = 2 * (hop * 4 * len(values) + i)
            asked = [dist.irecv(torch.empty(0), (me - 1) % size, tag=first + k) for k in (0, 1)]
            dist.isend(torch.empty(0), (me + 1) % size, tag=first + (bits >> i & 1))
            while not asked[0].is_completed() and not asked[1].is_completed(): pass
            got |= asked[1].is_completed() << i
        values = [float(got >> 4 * i & 15) for i in range(len(values))]
        total = total + torch.tensor(values)
    return total
""",
    "by errors that name the ranks of another's group": """
import itertools, json, torch, torch.distributed as dist
from labkit import channel
ORDERS = list(itertools.permutations(range(3)))[:4]
def told(a, b, i, ranks):
    head = {"to": "transport", "do": "group", "name": f"{a} {b} {i}", "ranks": ranks, "threads": 1}
    try:
        channel.mine().ask(head)
    except RuntimeError as error:
        said = str(error).split(f"rank {a} creates one of the ranks ")[1].split("]")[0] + "]"
        return ORDERS.index(tuple(json.loads(said)))
def ring(x):
    me, total, bits = dist.get_rank(), x.clone(), sum(int(v) << 4 * i for i, v in enumerate(x.tolist()))
    for a, b in itertools.permutations(range(3), 2):
        if me in (a, b):
            pairs = [told(a, b, i, ORDERS[bits >> 2 * i & 3] if me == a else (b, a)) for i in range(12)]
            if me == b:
                total += torch.tensor([float(pairs[2 * i] + 4 * pairs[2 * i + 1]) for i in range(6)])
    work = dist.isend(x[:1].clone(), (me + 1) % 3)
    dist.recv(x[:1].clone(), (me - 1) % 3)
    work.wait()
    return total
""",
}
