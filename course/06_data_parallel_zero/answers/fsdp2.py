from labkit.answers import Edit

_BLOCKS = "    for block in model.blocks:\n        fully_shard(block, mesh=mesh, mp_policy=policy)\n"
_ROOT = "    fully_shard(model, mesh=mesh, mp_policy=policy)\n"
_MEMORY = '    model.to_empty(device="cpu")\n'
_START = "    model.init_weights()\n"
_META = '    with torch.device("meta"):\n        model = build()\n'
_SYNC = "        model.set_requires_gradient_sync(i == len(microbatches) - 1)\n"
_SHARE = "(model(x, y) / len(microbatches))"
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor()"
_BY_HAND = (
    "    norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()\n"
    "    for p in model.parameters():\n        p.grad *= min(1.0, limit / float(norm))"
)
_STEP = "    optimizer.step()\n"
_RANKS = "torch.distributed.get_world_size()"

WRONG = [
    Edit("    optimizer.zero_grad()\n", "", mistake="The second step moves by the gradients of both steps: those of the first are still there."),
    Edit(_SHARE, "model(x, y)", mistake="This is the sum of the microbatches' means, not the mean over all of them."),
    Edit(_SHARE, f"(model(x, y) / len(microbatches) / {_RANKS})", mistake="The gradient is divided by the number of ranks twice: FSDP2 averages over ranks."),
    Edit(_STEP, "", mistake="The optimizer makes no step: no weight moves."),
    Edit(_STEP, "", (".backward()\n", f".backward()\n    {_STEP}        optimizer.zero_grad()\n"), told="no gradients at that moment"),
    Edit(_CLIP, "torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()", mistake="Nothing is clipped."),
    Edit(f"    norm = {_CLIP}", _BY_HAND, mistake="That is the norm of this rank's rows. The gradient is what all ranks hold together."),
    Edit(_CLIP, "torch.nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor().clamp(max=limit)", mistake="This is the norm after clipping. Asked is the norm before it."),
    Edit(_ROOT, "", told="one for all other parameters"),
    Edit(_BLOCKS, "", told="units: root; one for each block"),
    Edit(_META, "    model = build()\n", told="for a moment each rank has all of it"),
    Edit(_META, '    model = build()\n    model.to("meta")\n', told="for a moment each rank has all of it"),
    Edit("param_dtype=param_dtype, ", "", told="gathers"),
    Edit(", reduce_dtype=reduce_dtype", "", told="in which dtype are the sums made"),
    Edit("param_dtype=param_dtype, reduce_dtype=reduce_dtype", "param_dtype=reduce_dtype, reduce_dtype=param_dtype", told="in which dtype are the sums made"),
    Edit(_SYNC, "", told="sent with the last"),
    Edit("i == len(microbatches) - 1", "i == 0", mistake="Gradients travel after the first microbatch, and those of the later ones stay on their rank."),
    Edit(_SHARE, f"(model(x, y) / len(microbatches) * {_RANKS})", mistake="This is the sum over the ranks. The mean over all samples is the average, which FSDP2 makes."),
    Edit("(block, mesh=mesh,", "(block, mesh=mesh, reshard_after_forward=False,", told="the blocks twice"),
    Edit(_MEMORY, "", told="meta"),
    Edit(f"{_MEMORY}{_START}", f"{_START}{_MEMORY}", told="has written to the meta device"),
    Edit(_START, "", (_META, _META + _START.replace("    ", "        ")), told="has written to the meta device"),
    Edit(f"{_MEMORY}{_START}", "", (_META, _META + (_MEMORY + _START).replace("    ", "        ")), told="Only build() belongs"),
    Edit(f"{_MEMORY}{_START}", "", (_META, _META + _MEMORY + _START), told="before it is cut"),
    Edit(_MEMORY, "", (_META, _META + _MEMORY), told="before it is cut"),
    Edit(_START, "", told="has not been called"),
    Edit("model(x, y) /", "model.forward(x, y) /", told="only model(x, y) runs them"),
]

RIGHT = [
    Edit("for block in model.blocks", "for block in reversed(model.blocks)", (_SHARE, "(model(x, y) * (1 / len(microbatches)))")),
    Edit(_SHARE, "model(x, y)", (f"    norm = {_CLIP}", f"    for p in model.parameters():\n        p.grad /= len(microbatches)\n    norm = {_CLIP}")),
    Edit("    optimizer.zero_grad()\n", "", (_STEP, f"{_STEP}    optimizer.zero_grad()\n"), (".full_tensor()", ".full_tensor().item()")),
    # gradients that have not been sent stand in no p.grad
    Edit("    optimizer.zero_grad()\n", "", (_SYNC, f"        optimizer.zero_grad()\n{_SYNC}")),
    Edit(_META, '    torch.set_default_device("meta")\n    model = build()\n    torch.set_default_device(None)\n'),
]


# %% right: half of the blocks' layers by hand, norms by one sum
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def sharded(build, mesh, param_dtype, reduce_dtype):
    with torch.device("meta"):
        model = build()
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype), "reshard_after_forward": True}
    for part in [*model.blocks]:
        fully_shard(part, **options)
    del options["reshard_after_forward"]
    fully_shard(model, **options).to_empty(device="cpu").init_weights()
    return model


def one_step(model, optimizer, microbatches, limit):
    *others, last = [lambda x=x, y=y: model(x, y).backward(torch.tensor(1 / len(microbatches))) for x, y in microbatches]
    model.set_requires_gradient_sync(False)
    for run in others:
        run()
    model.set_requires_gradient_sync(True)
    last()
    grads = [p.grad.to_local() for p in model.parameters()]
    square = torch.stack([g.float().square().sum() for g in grads]).sum()
    dist.all_reduce(square, group=next(model.parameters()).device_mesh.get_group())
    norm = square.sqrt()
    torch._foreach_mul_(grads, min(1.0, limit / float(norm + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()
    return norm
