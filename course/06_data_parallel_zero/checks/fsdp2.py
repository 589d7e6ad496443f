"""Lab 06, torch's FSDP2 as one types it: `sharded` makes units of a model, `one_step` trains with it.

Torch does the work, so most of what a learner leaves out changes no loss. It changes messages, which the check reads:

| left out or in another place        | how it is seen                                                     |
|-------------------------------------|--------------------------------------------------------------------|
| the meta device                     | the model's own `__init__` marks where its parameters are          |
| memory before the model is cut      | the model marks when all its parameters have memory and are whole  |
| first weights, or memory for them   | `init_weights` notes where it wrote; the drive refuses to go on    |
| a unit for each block, one for the rest | names of the units; bytes of each gather                       |
| `param_dtype`, `reduce_dtype`       | bytes of gathers, bytes of reduce-scatters                         |
| `set_requires_gradient_sync`        | reduce-scatters of a step                                          |
| shares of the mean, clipping, zeros | weights after two steps, in which nothing cancels (bf16: to 4 %)   |
"""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]


def _drive(exercise: Any, width: int, blocks: int, batches: Any, limit: float, dtypes: Any, group: Any = None) -> Any:
    import torch as t
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor

    def numbers(shape: Any, shift: int) -> Any:
        """Positive ones, so that no sum cancels."""
        return (0.2 + 0.1 * (t.arange(shape.numel()) + shift).sin()).view(shape) / shape[-1] ** 0.5

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(self.up(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(width, width, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.norm = nn.Parameter(t.empty(width))
            mark(f"built on {self.norm.device.type}")  # type: ignore[name-defined]  # noqa: F821

        def look(self) -> None:
            if not any(isinstance(p, DTensor) or p.is_meta for p in self.parameters()):
                mark("whole")  # type: ignore[name-defined]  # noqa: F821

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            """What `to_empty` and `to` call."""
            moved = super()._apply(*args, **kwargs)
            self.look()
            return moved

        @t.no_grad()
        def init_weights(self) -> None:
            self.look()
            wrote.append(any(p.is_meta for p in self.parameters()))
            for n, p in enumerate(self.parameters()):
                whole = numbers(p.shape, n)
                if isinstance(p, DTensor):
                    whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                p.copy_(whole)

        def forward(self, x: Any, y: Any) -> Any:
            h = self.embedding(x)
            for block in self.blocks:
                h = block(h)
            return (h * self.norm * y).mean()

    def whole(p: Any) -> Any:
        return p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach().clone()

    wrote: list[bool] = []  # of each call of `init_weights`: to the meta device
    mesh = DeviceMesh.from_group(group, "cpu")
    model = exercise.sharded(Model, mesh, *(getattr(t, name) for name in dtypes))
    if not wrote:
        raise RuntimeError("init_weights() has not been called; the memory that to_empty() gives holds any numbers")
    if wrote[-1]:
        raise RuntimeError("init_weights() has written to the meta device, which keeps nothing; first comes to_empty()")
    units = [name or "root" for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    mark(f"units {' '.join(sorted(units)) or 'none'}")  # type: ignore[name-defined]  # noqa: F821
    before = {name: whole(p) for name, p in model.named_parameters()}
    optimizer = t.optim.SGD(model.parameters(), lr=0.02)
    norms = []
    for step in batches:
        mark("step")  # type: ignore[name-defined]  # noqa: F821
        norm = exercise.one_step(model, optimizer, step, limit)
        mark("after")  # type: ignore[name-defined]  # noqa: F821
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    return {"norms": norms, "moved": {name: whole(p) - before[name] for name, p in model.named_parameters()}}


def _serial(ranks: Inputs) -> list[dict[str, Any]]:
    """The same two steps in one process, in float64."""
    r = ranks[0]
    width, names = r["width"], ["norm", "embedding.weight"]
    shapes = [(width,), (width, width)]
    for i in range(r["blocks"]):
        names += [f"blocks.{i}.up.weight", f"blocks.{i}.down.weight"]
        shapes += [(2 * width, width), (width, 2 * width)]
    start = {}
    for n, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        wave = (torch.arange(math.prod(shape)) + n).sin().view(shape)
        start[name] = ((0.2 + 0.1 * wave) / shape[-1] ** 0.5).double()
    now, norms = {name: w.clone().requires_grad_() for name, w in start.items()}, []
    for step in range(len(r["batches"])):
        samples = [pair for one in ranks for pair in one["batches"][step]]
        x, y = (torch.cat(parts).double() for parts in zip(*samples, strict=True))
        h = x @ now["embedding.weight"].T
        for i in range(r["blocks"]):
            h = h + h @ now[f"blocks.{i}.up.weight"].T @ now[f"blocks.{i}.down.weight"].T
        grads = torch.autograd.grad((h * now["norm"] * y).mean(), list(now.values()))
        norm = math.hypot(*(float(grad.norm()) for grad in grads))
        norms.append(norm)
        factor = 0.02 * min(1.0, r["limit"] / norm)
        now = {n: (w - factor * g).detach().requires_grad_() for (n, w), g in zip(now.items(), grads, strict=True)}
    moved = {name: (now[name] - w).detach().float() for name, w in start.items()}
    return [{"norms": norms, "moved": moved}] * len(ranks)


def _units(answer: Answer) -> str | None:
    blocks = answer.inputs[0]["blocks"]
    want = " ".join(sorted(["root", *(f"blocks.{i}" for i in range(blocks))]))
    for one in answer.evidence:
        marks = [text for text, _ in one.marks]
        if "built on cpu" in marks:
            return ("the model is built on the CPU: for a moment each rank has all of it. On the meta device it has "
                    "shapes and no memory")  # fmt: skip
        if "whole" in marks:
            return ("the model gets its memory before it is cut: for a moment each rank has all of it. What is on the "
                    "meta device can be cut as well")  # fmt: skip
        if (units := f"units {want}") not in marks:
            found = next((text for text in marks if text.startswith("units")), "units none")
            return f"the {found.replace(' ', ': ', 1)}; one for each block and one for the rest are {units[6:]}"
    return None


def _messages(answer: Answer) -> str | None:
    """Bytes and numbers of messages, between the beginning and the end of each step."""
    r, ranks = answer.inputs[0], len(answer.inputs)
    width, blocks, (weight, gradient) = r["width"], r["blocks"], (getattr(torch, name).itemsize for name in r["dtypes"])
    block, rest = 4 * width * width, _padded(width, ranks) * width + _padded(width, ranks)
    for rank, one in enumerate(answer.evidence):
        starts, ends = ([moment for text, moment in one.marks if text == word] for word in ("step", "after"))
        for step, (start, end) in enumerate(zip(starts, ends, strict=True)):
            microbatches = len(r["batches"][step])
            calls = [call for call in one.calls if start < call.started < end]
            gathers, sums = ([c.nbytes for c in calls if c.name == name] for name in ("all_gather", "reduce_scatter"))
            if len(sums) != blocks + 1:
                why = " They can be added up on the rank, and sent with the last" * (
                    len(sums) == microbatches * (blocks + 1)
                )
                return (f"rank {rank} calls reduce_scatter {len(sums)} times in a step of {microbatches} microbatches, "
                        f"with {blocks + 1} units.{why}")  # fmt: skip
            if sum(sums) != gradient * (blocks * block + rest):
                right = gradient * (blocks * block + rest)
                return (f"rank {rank} reduce-scatters {sum(sums)} bytes a step; {gradient} bytes a number, padding "
                        f"included, are {right}: in which dtype are the sums made?")  # fmt: skip
            want = weight * microbatches * (2 * blocks * block + rest)
            if sum(gathers) != want:
                return (f"rank {rank} gathers {sum(gathers)} bytes in a step of {microbatches} microbatches. {want} "
                        f"are {weight} bytes a number, the blocks twice a microbatch and the rest once")  # fmt: skip
    return None


def _padded(rows: int, ranks: int) -> int:
    """FSDP2 cuts rows among ranks, and pads to a multiple."""
    return -(-rows // ranks) * ranks


def _ranks(draw: Draw, ranks: int, width: int, blocks: int, microbatches: int, limit: float) -> Inputs:
    """Draw two steps; ranks have data of different sizes, so that an average of norms is not the norm."""
    return [
        {"width": width, "blocks": blocks, "limit": limit, "dtypes": ("bfloat16", "float32"),
         "batches": [[tuple((1 + rank) * (0.5 + draw.tensor(4, width).sigmoid()) for _ in range(2))
                      for _ in range(microbatches)] for _ in range(2)]}
        for rank in range(ranks)
    ]  # fmt: skip


def _clipped(draw: Draw) -> Inputs:
    return _ranks(draw, 2, 2 * draw.integer(2, 4), 2, draw.integer(2, 3), 0.1)


def _long(draw: Draw) -> Inputs:
    """Draw many blocks, of which a rank has no more than two whole."""
    return _ranks(draw, 2, 8, 3, 3, 0.1)


FSDP2 = Exercise(
    "fsdp2",
    reference=_serial,
    function="sharded",
    drive=_drive,
    group="group",
    dtypes=(torch.float32,),
    changes=("batches",),
    errors={
        "Invariant encountered": "A block has no parameters left: an earlier call of fully_shard has taken them.",
        "no attribute 'set_": "The model itself is no unit: fully_shard has not been called for it, one for all "
        "other parameters.",
        "no attribute 'full_tensor": "There are no gradients at that moment, or they are of parameters that no "
        "call of fully_shard has taken.",
        "Cannot copy out of meta": "init_weights() runs where nothing that is made has memory. Only build() belongs "
        "into the block of the meta device.",
        "mixed torch.Tensor and DTensor": "A unit's weights are gathered by hooks, and only model(x, y) runs them.",
    },
    rtol=0.04,
    atol=1e-5,
    cases=[
        Case("2 ranks, one block, one microbatch a step, nothing to clip", _ranks(Draw(6), 2, 2, 1, 1, 1e3)),
        Case("several microbatches, and a norm above the limit", _clipped, points=2, hidden=True),
        Case("built on no device; units; bytes and numbers of messages", _long, points=2, hidden=True, accept=[
            _units, _messages]),
    ],
    idea="fully_shard takes the parameters that no earlier call has taken. And which lines need memory, which only "
    "shapes?",
    hint="sharded: build() under torch.device('meta'); fully_shard(block, mesh=mesh, mp_policy=policy) for each block, "
    "then of the model; to_empty(device='cpu'); init_weights(). one_step: zero_grad; for each microbatch "
    "set_requires_gradient_sync(whether it is the last), then (loss / m).backward(); clip_grad_norm_(...)"
    ".full_tensor(); step.",
)  # fmt: skip
