"""Kernels are operators of torch, and yet training does not import torch's compiler."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
from minimegatron.kernels import choice, ops
x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
norm = choice.TABLE["norm"]
assert choice.choose("norm", "auto", x, w) in (norm.native, norm.torch)
ops.swiglu(ops.norm(x, w, None, 1e-6)).sum().backward()
assert x.grad is not None and "torch._dynamo" not in sys.modules
f = torch.compile(lambda x, w: norm.native(x, w, None, 1e-6).sum(), backend="eager", fullgraph=True)
assert torch.allclose(f(x, w), torch.tensor(32.0)) and "torch._dynamo" in sys.modules
f(x, w).backward()
"""


def test_kernels_import_the_compiler_when_something_is_compiled_and_not_before():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
