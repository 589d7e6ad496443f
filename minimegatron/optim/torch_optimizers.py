"""torch's AdamW and SGD, and the base of ours, without the import of torch's compiler.

torch prepares an optimizer's methods for being compiled: the first call of each imports `torch._dynamo`, for which a
process needs a CPU-second, and training on eight ranks of a laptop eight. Nothing here compiles a step of an optimizer,
so these classes have the same methods without that preparation (`inspect.unwrap`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


class Optimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer`."""

    add_param_group: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: Any = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Optimizer, torch.optim.AdamW):
    """`torch.optim.AdamW`."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Optimizer, torch.optim.SGD):
    """`torch.optim.SGD`."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
