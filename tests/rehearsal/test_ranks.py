"""Groups of NCCL on simulated GPUs: what they refuse, who waits, and a mistake in a model that only a GPU would see."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearsal import RehearsalFailed, rehearse
from tests.rehearsal.record import Record

pytestmark = pytest.mark.thorough

HEAD = """
import datetime, os, sys, torch, torch.distributed as dist
from minimegatron.launch.rank import init, finish, report
from tests.rehearsal.record import RECORD

rank, world = init(30.0)
device = torch.device("cuda", rank)
answers = {}

def refused(name, call):
    try:
        call()
        answers[name] = "nothing refused it"
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
"""
TALK = (
    HEAD
    + """
other = torch.device("cuda", 1 - rank)
refused("cpu", lambda: dist.all_reduce(torch.ones(2)))
refused("cpu in a new group", lambda: dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1])))
refused("holes", lambda: dist.all_reduce(torch.ones(4, 4, device=device).t()[1:]))
refused("another rank's GPU", lambda: dist.all_reduce(torch.ones(2, device=other)))
gloo = dist.new_group([0, 1], backend="gloo")
x = torch.ones(2)
dist.all_reduce(x, group=gloo)
answers["gloo"] = [x.tolist(), dist.get_backend(gloo), dist.get_backend()]

RECORD.clear()
x = torch.full((3,), float(rank + 1), device=device)
with RECORD.phase("all_reduce"):
    dist.all_reduce(x)
with RECORD.phase("asynchronous"):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
answers["sums"] = x.cpu().tolist()
with RECORD.phase("timeout"):
    dist.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=20))
with RECORD.phase("barrier"):
    dist.barrier()
objects = [None, None]
with RECORD.phase("objects"):
    dist.all_gather_object(objects, {"rank": rank})
answers["objects"] = objects
with RECORD.phase("p2p"):
    y = torch.empty(3, device=device)
    mine = torch.full((3,), float(rank), device=device)
    ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
answers["received"] = y.tolist()
late, z = dist.isend(mine, 1 - rank), torch.empty(3, device=device)
work = dist.irecv(z, 1 - rank)
torch.cuda.synchronize()
answers["synchronised"] = z.tolist()
work.wait()
late.wait()
ahead, go = torch.full((2,), float(rank), device=device), torch.ones(1, device=device)
if rank == 0:  # a receive is posted ahead, the stream is synchronised, and only then the other rank is told to send
    work = dist.irecv(ahead, 1)
    torch.cuda.current_stream().synchronize()
    dist.send(go, 1)
    work.wait()
else:
    dist.recv(go, 0)
    dist.send(ahead, 0)
answers["ahead"] = ahead.tolist()
answers["waits"] = {p: RECORD.count("waits", p) for p in ("all_reduce", "asynchronous", "timeout", "barrier", "p2p")}
answers["waits"]["objects"] = RECORD.count("waits", "objects")
answers["bytes"] = sorted(nbytes for p, _, nbytes, _ in RECORD.messages if p == "all_reduce")
answers["launches"] = RECORD.count("launches", "all_reduce")
report(answers)
finish()
"""
)
# The same with the device synchronised.
AHEAD = """
import datetime, torch, torch.distributed as dist
from minimegatron.launch.rank import report
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=4))
rank = dist.get_rank()
torch.cuda.set_device(rank)
x, go = torch.full((2,), float(rank), device="cuda"), torch.ones(1, device="cuda")
if rank == 0:
    work = dist.irecv(x, 1)
    torch.cuda.synchronize()
    dist.send(go, 1)
    work.wait()
else:
    dist.recv(go, 0)
    dist.send(x, 0)
report(x.tolist())
"""
MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, mask_device):
        super().__init__()
        self.weight, self.mask_device = nn.Parameter(torch.ones(4, 4, device="cuda")), mask_device

    def forward(self, x):
        mask = torch.ones(4, 4, dtype=torch.bool, device=self.mask_device).triu(1)
        return (x @ self.weight).masked_fill(mask, 0.0)

Layer("cuda")(torch.ones(4, 4, device="cuda")).sum().backward()
print("right", flush=True)
Layer("cpu")(torch.ones(4, 4, device="cuda")).sum().backward()
"""


@pytest.fixture(scope="module")
def talk() -> list[dict[str, Any]]:
    return [rank.report for rank in rehearse(TALK, 2).ranks]


def test_what_nccl_refuses(talk: list[dict[str, Any]]) -> None:
    for answers in talk:
        assert "No backend type associated with device type cpu" in answers["cpu"]
        assert "No backend type associated with device type cpu" in answers["cpu in a new group"]
        assert "Tensors must be contiguous" in answers["holes"]
        assert "Duplicate GPU detected" in answers["another rank's GPU"]
        assert answers["gloo"] == [[2.0, 2.0], "gloo", "nccl"]


def test_messages_carry_numbers(talk: list[dict[str, Any]]) -> None:
    for rank, answers in enumerate(talk):
        assert answers["sums"] == [6.0] * 3
        assert answers["objects"] == [{"rank": 0}, {"rank": 1}]
        assert answers["received"] == answers["synchronised"] == [float(1 - rank)] * 3
        assert answers["bytes"] == [12]
        assert answers["launches"] == 1


def test_who_waits_for_a_message(talk: list[dict[str, Any]]) -> None:
    """The stream waits for a collective, the host does not, unless it says how long."""
    for answers in talk:
        waits = answers["waits"]
        assert waits["all_reduce"] == waits["asynchronous"] == waits["p2p"] == 0
        assert waits["timeout"] == waits["barrier"] == 1
        assert waits["objects"] >= 3


def test_a_synchronised_device_waits_for_posted_receives(talk: list[dict[str, Any]]) -> None:
    """A stream does not; both ranks would wait for ever, here until the group's deadline."""
    assert [answers["ahead"] for answers in talk] == [[1.0, 1.0]] * 2
    with pytest.raises(RehearsalFailed, match="(?i)timed out|timeout|closed") as failed:
        rehearse(AHEAD, 2)
    assert "wait_for_receives" in failed.value.result.ranks[0].stderr


def test_a_cpu_tensor_in_a_model_is_found_with_its_line() -> None:
    with pytest.raises(RehearsalFailed) as failed:
        rehearse(MODEL)
    line = next(n for n, text in enumerate(MODEL.splitlines(), 1) if "masked_fill" in text)
    assert "found at least two devices, cpu and cuda:0" in str(failed.value)
    assert f"script.py:{line} forward" in str(failed.value)
    assert failed.value.result.ranks[0].stdout == "right\n"


def test_without_devices_the_same_script_computes_on_the_cpu() -> None:
    script = """
    import torch
    from minimegatron.launch.rank import report
    report([torch.cuda.is_available(), (1 + torch.ones(1)).item()])
    """
    plain = rehearse(script, gpus=0)
    assert plain.report[1] == 2.0
    assert plain.record == Record()


@pytest.mark.parametrize(("shown", "count"), [("1,3", 2), pytest.param("", 0, marks=pytest.mark.thorough)])
def test_hidden_devices(shown: str, count: int) -> None:
    script = "import torch\nfrom minimegatron.launch.rank import report\nreport(torch.cuda.device_count())\n"
    assert rehearse(script, gpus=4, env={"CUDA_VISIBLE_DEVICES": shown}).report == count
