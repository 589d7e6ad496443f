"""Kernels are operators of torch, rank 0 counts FLOPs, and yet training does not import torch's compiler."""

from __future__ import annotations

import subprocess
import sys

from tests.thorough import THOROUGH

SCRIPT = """
import sys, torch
from minimegatron.kernels import choice, ops
from minimegatron.models.families import family_config
from minimegatron.training.flops import forward_flops
x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
norm = choice.TABLE["norm"]
assert choice.choose("norm", "auto", x, w) in (norm.native, norm.torch)
ops.swiglu(ops.norm(x, w, None, 1e-6)).sum().backward()
for family in ("gpt2", "llama", "gemma2"):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": 256}
    assert sum(forward_flops(family_config(family, **sizes), 32).values()) > 0
assert x.grad is not None and not {"torch._dynamo", "sympy"} & set(sys.modules)
f = torch.compile(lambda x, w: norm.native(x, w, None, 1e-6).sum(), backend="eager", fullgraph=True)
assert torch.allclose(f(x, w), torch.tensor(32.0)) and "torch._dynamo" in sys.modules
f(x, w).backward()
"""


@THOROUGH
def test_the_compiler_is_imported_when_something_is_compiled_and_not_before():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
