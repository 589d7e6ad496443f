"""The device itself: it refuses what CUDA refuses, counts what makes the host wait, and nothing else.

A rehearsal that passes means as much as these tables: a rule that is not in them may be missing from the device.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.rehearsal import rehearse
from tests.rehearsal.record import ROOT, Record, place

# What CUDA refuses -> words of the error. x and host are 4 x 4 of ones on cuda:0 and on the CPU, y is 0..3, i int64.
REFUSED = {
    "x + host": "found at least two devices, cpu and cuda:0",
    "host.add_(x)": "found at least two devices, cpu and cuda:0",
    "host @ x": "found at least two devices",
    "x @ x.to('cuda:1')": "found at least two devices, cuda:0 and cuda:1",
    "torch.cat([x, host])": "found at least two devices",
    "torch.where(x > 0, x, host)": "found at least two devices",
    "torch.zeros(()).add_(y[0])": "found at least two devices",  # a result on the host of numbers on the GPU
    "x.index_put_((i,), host)": "found at least two devices",
    "host[i]": "indices should be either on cpu",
    "F.embedding(torch.zeros(2, dtype=torch.int64), x)": "found at least two devices",
    "F.layer_norm(x, (4,), torch.ones(4))": "found at least two devices",
    "torch.optim.SGD([x], 0.1); x.grad = host": "device",
    "F.scaled_dot_product_attention(*3 * [x[None, None]], attn_mask=host > 0)": "cuda:0 and cpu",
    "x.numpy()": "can't convert cuda:0 device type tensor to numpy",
    "import numpy; numpy.asarray(x)": "can't convert cuda:0 device type tensor to numpy",
    "i @ i": "not implemented for torch.int64",
    "i.view(2, 2) @ i.view(2, 2)": "not implemented for torch.int64",
    "torch.rand(3, device='cuda', generator=torch.Generator())": "Expected a 'cuda' device type for generator",
    "torch.rand(3, device='cuda:1', generator=torch.Generator('cuda:0'))": "Expected a generator of cuda:1",
    "torch.ones(2, device='cuda:2')": "invalid device ordinal",
    "torch.cuda.set_device(2)": "invalid device ordinal",
    "torch.ones(2, device='cuda', pin_memory=True)": "Only dense CPU tensors can be pinned",
    "torch.ones(2, device='meta').to('cuda')": "Cannot copy out of meta tensor",
    "x[i + 1]": "device-side assert",
    "F.embedding(i + 1, x)": "device-side assert",
    "x.gather(1, i[:, None] + 1)": "device-side assert",
    "F.cross_entropy(x, i + 1)": "device-side assert",
    "x.index_select(0, i + 1)": "device-side assert",
    "x.scatter_add(0, i[None] + 1, x)": "device-side assert",
    "torch.ops.aten._scaled_dot_product_flash_attention(*3 * [x[None, None]])": "only fp16 and bf16",
}
EIGHT = """
import torch, random
def eight(m, n, dtype=torch.float8_e4m3fn): return torch.ones(m, n, device="cuda").to(dtype)
one = torch.ones((), device="cuda")
"""
REFUSED |= {
    EIGHT + "torch._scaled_mm(eight(16, 16), eight(16, 16), one, one, out_dtype=torch.bfloat16)": "column-major",
    EIGHT + "torch._scaled_mm(eight(16, 24), eight(16, 24).t(), one, one)": "divisible by 16",
    EIGHT + "torch._scaled_mm(eight(16, 16), eight(24, 16).t(), one, one)": "divisible by 16",
    EIGHT + "torch._scaled_mm(*2 * [eight(16, 16, torch.float8_e5m2)], one, one)": "two Float8_e5m2",
    EIGHT + "torch._scaled_mm(eight(16, 16), eight(16, 16).t(), one.double(), one)": "scales must be fp32",
    EIGHT + "torch._scaled_mm(eight(16, 16), eight(16, 16).t(), one.cpu(), one)": "found at least two devices",
    EIGHT + "b = eight(17, 16).view(-1)[8:264].view(16, 16)\n"
    "torch._scaled_mm(eight(16, 16), b.t(), one, one)": "aligned to 16 bytes",
    "h = x[:, :3].bfloat16()\nF.grouped_mm(h, torch.ones(1, 3, 4, device='cuda').bfloat16(), offs=i[-1:].int() + 1)": (
        "multiples of 16 bytes"
    ),
}
# What no capture allows: every way to wait, and what depends on it.
CAPTURED = {
    "x.sum().item()": "item",
    "x.tolist()": "tolist",
    "x.cpu()": "copy to the host",
    "torch.tensor([1.0], device='cuda')": "copy from pageable memory",
    "host.cuda()": "copy from pageable memory",
    "x[x > 0]": "boolean mask",
    "x.nonzero()": "size depends on data",
    "torch.cuda.synchronize()": "cuda.synchronize",
    "torch.cuda.current_stream().synchronize()": "stream.synchronize",
    "torch.cuda.empty_cache()": "empty_cache",
}
GRAPH = "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n    "
REFUSED |= {GRAPH + code: f"not permitted when stream is capturing: {kind}" for code, kind in CAPTURED.items()}

# A backward pass runs on a thread of the autograd engine, a device each.
IN_BACKWARD = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a): return 2 * a
    @staticmethod
    def backward(ctx, g): {}
f = lambda a: Twice.apply(a.requires_grad_())
"""
# Code -> the kinds of waits that it is.
WAITS = {
    "x.sum().item()": ["item"],
    "float(y[1])": ["item"],
    "bool(y[1] > 0)": ["item"],
    "[0, 1, 2][i[1]]": ["item"],
    "x.tolist()": ["tolist"],
    "f'{y[1]:.1f}'": ["item"],
    "str(x)": ["print"],
    "x.cpu()": ["copy to the host"],
    "host.copy_(x)": ["copy to the host"],
    "torch.equal(x, x)": ["equal"],
    "torch.allclose(x, x)": ["allclose"],
    "host.cuda()": ["copy from pageable memory"],
    "host.to('cuda', non_blocking=True)": ["copy from pageable memory, non_blocking"],
    "host.pin_memory().cuda()": ["copy from pinned memory"],
    "torch.tensor([1.0, 2.0], device='cuda')": ["copy from pageable memory"],
    "x.new_tensor(1.0)": ["copy from pageable memory"],
    "x[0, 0] = 1.0": ["copy from pageable memory"],  # a number becomes a tensor of the host
    "x[0] = 1.0": [],  # fill_
    "x.copy_(host)": ["copy from pageable memory"],
    "x[x > 0]": ["boolean mask in index"],
    "x[x > 0] = 0.0": [],  # masked_fill
    "x[x > 0] = torch.ones(16, device='cuda')": ["boolean mask in index_put"],
    "x[torch.tensor([0, 1])]": ["copy from pageable memory: CPU index in index"],
    "x.nonzero()": ["size depends on data: nonzero"],
    "torch.where(x > 0)": ["size depends on data: nonzero"],
    "x.masked_select(x > 0)": ["size depends on data: masked_select"],
    "i.unique()": ["size depends on data: _unique2"],
    "i.bincount()": ["size depends on data: bincount"],
    "y.repeat_interleave(i)": ["size depends on data: repeat_interleave without output_size"],
    "y.repeat_interleave(i, output_size=6)": [],
    "torch.cuda.synchronize()": ["cuda.synchronize"],
    "torch.cuda.current_stream().synchronize()": ["stream.synchronize"],
    "torch.cuda.Event().synchronize()": ["event.synchronize"],
    "torch.cuda.empty_cache()": ["empty_cache"],
    "F.grouped_mm(x, x[None], offs=i[-1:].int() + 1)": ["grouped_mm reads its offsets"],  # fp32
    # none of these waits
    "host.pin_memory().to('cuda', non_blocking=True)": [],
    "torch.empty(4, 4, pin_memory=True)[1:].to('cuda', non_blocking=True)": [],
    "x.copy_(host.pin_memory(), non_blocking=True)": [],
    "x.to('cpu', non_blocking=True)": [],
    "torch.empty(4, 4, pin_memory=True).copy_(x, non_blocking=True)": [],
    "torch.full((), 2.0, device='cuda') * x": [],
    "torch.tensor(2.0) * x": [],  # a CPU scalar is an argument of the kernel
    "x.masked_fill(x > 0, 0.0)": [],
    "x[i]": [],
    "torch.where(x > 0, x, 0.0)": [],
    "x.to('cuda:1')": [],
    "torch.zeros(4, device='cuda'); torch.randn(4, device='cuda')": [],
    "x.argsort(); x.topk(2); x.cumsum(0)": [],
    "x.requires_grad_(); (x @ x).sum().backward()": [],
    IN_BACKWARD.format("return g * torch.zeros(4).cuda() + torch.tensor(2.0, device='cuda')")
    + "f(x).sum().backward()": ["copy from pageable memory"] * 2,
    IN_BACKWARD.format("return g * torch.zeros(4, device='cuda')") + "f(x).sum().backward()": [],
    "e = torch.cuda.Event(enable_timing=True); e.record(); e.query()": [],
}
# Code -> the launches that it is.
LAUNCHES = {
    "x.view(16).t()[2:].detach()": [],
    "torch.empty(4, device='cuda'); torch.empty_like(x); x.new_empty(3)": [],
    "x + x": ["add"],
    "x.add_(1).mul_(2)": ["add_", "mul_"],
    "x.contiguous(); x.float(); x.to('cuda')": [],
    "x.t().contiguous()": ["clone"],
    "x.bfloat16()": ["_to_copy"],
    "x[i]": ["index"],
    "F.scaled_dot_product_attention(*3 * [x.bfloat16()[None, None]])": ["_to_copy", "flash attention"],
}
# Code -> what it leaves in `answer`.
ANSWERS: dict[str, Any] = {
    "answer = [x.is_cuda, str(x.device), torch.cuda.device_count(), torch.cuda.is_available()]": [
        True, "cuda:0", 2, True
    ],
    "answer = [x.data_ptr() == x.view(16).data_ptr(), x[1:].data_ptr() - x.data_ptr()]": [True, 16],
    "with torch.cuda.device(1): answer = [str(torch.ones(1, device='cuda').device), torch.cuda.current_device()]": [
        "cuda:1", 1
    ],
    "x.requires_grad_(); (2 * x).sum().backward(); answer = [str(x.grad.device), x.grad[0].tolist()]": [
        "cuda:0", [2.0] * 4
    ],
    "x = torch.ones(2, device='cuda:1', requires_grad=True); (x * 3).sum().backward(); answer = str(x.grad.device)": (
        "cuda:1"
    ),
    "z = y.clone(); z.resize_(6); a = list(z.shape); x[0] = 2.0; x.t_(); y.unsqueeze_(0); "
    "answer = [a, x[0].tolist(), list(y.shape), (y + 1).tolist()]": [
        [6], [2.0, 1.0, 1.0, 1.0], [1, 4], [[1.0, 2.0, 3.0, 4.0]]
    ],
    "p = torch.nn.Parameter(x); p.data = 5 * p.data; answer = [p.sum().item(), str(p.device)]": [80.0, "cuda:0"],
    "import copy; m = copy.deepcopy(torch.nn.Linear(2, 2).cuda()); answer = str(m.weight.device)": "cuda:0",
    "m = torch.nn.Linear(2, 2); w = m.weight; w.mark = 1; m.cuda(); m(y[:2]).sum().backward(); "
    "answer = [w is m.weight, w.mark, isinstance(w, torch.nn.Parameter), str(w.grad.device), w.grad.tolist()]": [
        True, 1, True, "cuda:0", [[0.0, 1.0], [0.0, 1.0]]
    ],
    "m = torch.nn.Linear(2, 2).cuda(); w = m.weight; m(y[:2]).sum().backward(); m.cpu(); "
    "answer = [w is m.weight, type(w).__name__, str(m.weight.device), str(w.grad.device), m(host[0, :2]).numel()]": [
        True, "Parameter", "cpu", "cpu", 2
    ],
    "m = torch.nn.Linear(2, 2, device='meta').to_empty(device='cuda'); answer = str(m.weight.device)": "cuda:0",
    "m = torch.nn.Linear(2, 2).cuda(); w = m.weight; m.to('cuda'); m.bfloat16(); "
    "answer = [w is m.weight, str(m(y[:2].bfloat16()).dtype)]": [True, "torch.bfloat16"],
    # drawing on one device moves no other's numbers
    "torch.manual_seed(1); a = torch.rand(2); torch.manual_seed(1); torch.rand(9, device='cuda'); "
    "answer = torch.equal(a, torch.rand(2))": True,
    "torch.cuda.manual_seed(1); a = torch.rand(2, device='cuda'); s = torch.cuda.get_rng_state(); b = torch.rand(2, "
    "device='cuda').tolist(); torch.cuda.set_rng_state(s); answer = [b == torch.rand(2, device='cuda').tolist()]": [
        True
    ],
    # a graph does nothing when it is captured, and everything when it is played
    "g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    z = y + 1; y.mul_(2); w = z[1:] * y[1:]\n"
    "before = y.tolist(); g.replay(); a = w.tolist(); y.fill_(1.0); g.replay(); answer = [before, a, w.tolist()]": [
        [0.0, 1.0, 2.0, 3.0], [4.0, 12.0, 24.0], [4.0, 4.0, 4.0]
    ],
    "g = torch.cuda.CUDAGraph(); torch.cuda.manual_seed(3); a = torch.rand(2, device='cuda').tolist(); "
    "torch.cuda.manual_seed(3)\nwith torch.cuda.graph(g):\n    r = torch.rand(2, device='cuda')\n"
    "g.replay(); answer = r.tolist() == a": True,
    "g = torch.cuda.CUDAGraph()\nx.requires_grad_()\nwith torch.cuda.graph(g):\n    (x * y).sum().backward()\n"
    "g.replay(); answer = x.grad[0].tolist()": [0.0, 1.0, 2.0, 3.0],
}  # fmt: skip
CHOICES = {
    "h = torch.ones(1, 2, 4, 8, device='cuda').half(); F.scaled_dot_product_attention(h, h, h)": "attention flash",
    "h = torch.ones(1, 2, 4, 8, device='cuda'); "
    "F.scaled_dot_product_attention(h, h, h)": "attention efficient: float32",
    "h = torch.ones(1, 2, 4, 8, device='cuda').half(); "
    "F.scaled_dot_product_attention(h, h, h, h.new_zeros(4, 4))": "attention efficient: float16, a table",
    "h = torch.ones(1, 2, 4, 8, device='cuda'); "
    "F.scaled_dot_product_attention(h, h[:, :1], h[:, :1], enable_gqa=True)": "attention math",
    EIGHT + "torch._scaled_mm(eight(16, 32), eight(48, 32).t(), one, one, out_dtype=torch.bfloat16)": "_scaled_mm",
}


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    codes = [*REFUSED, *WAITS, *LAUNCHES, *ANSWERS, *CHOICES]
    path = tmp_path_factory.mktemp("snippets") / "code.json"
    path.write_text(json.dumps({code: code for code in codes}))
    result = rehearse("tests.rehearsal.snippets", gpus=2, args=[str(path)])
    return result.report


@pytest.mark.parametrize("code", REFUSED)
def test_what_cuda_refuses_is_refused(happened: dict[str, Any], code: str) -> None:
    assert re.search(REFUSED[code], happened[code].get("error", "nothing refused it")), happened[code]
    assert "error" in happened[code]


@pytest.mark.parametrize("code", WAITS)
def test_what_makes_the_host_wait_is_counted(happened: dict[str, Any], code: str) -> None:
    assert "error" not in happened[code], happened[code]
    assert happened[code]["waits"] == WAITS[code]


@pytest.mark.parametrize("code", LAUNCHES)
def test_launches(happened: dict[str, Any], code: str) -> None:
    assert happened[code]["launches"] == LAUNCHES[code], happened[code]


@pytest.mark.parametrize("code", ANSWERS)
def test_numbers_are_real_and_say_where_they_are(happened: dict[str, Any], code: str) -> None:
    assert happened[code]["answer"] == ANSWERS[code], happened[code]


@pytest.mark.parametrize("code", CHOICES)
def test_what_a_library_would_choose_is_told(happened: dict[str, Any], code: str) -> None:
    assert any(CHOICES[code] in choice for choice in happened[code]["choices"]), happened[code]


def test_a_place_is_a_line_of_the_project() -> None:
    record = Record()
    record.wait("item")
    names = {"place": place}
    exec(compile("def norm():\n    return place()\nfound = norm()", f"{ROOT}/models/x.py", "exec"), names)
    assert names["found"] == "models/x.py:2 norm"
    assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record
