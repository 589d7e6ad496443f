from labkit.answers import Edit, Same

_SCATTER = "        dist.reduce_scatter_tensor(shard, padded, group=machine)\n"
_ADD = "        total = shard if total is None else total + shard\n"
_ACROSS = "    dist.all_reduce(total, group=across)\n"

WRONG = [
    Edit(_ACROSS, "", mistake="This is the sum of one machine. The other machines have samples, too."),
    Edit("group=machine)", "group=across)", (_ACROSS, _ACROSS.replace("across", "machine")), ("get_world_size(machine)", "get_world_size(across)"), mistake="The groups have changed places: the ranks of a machine share a gradient out, and ranks across have the same shard."),
    Edit("(0, -len(gradient) % ranks)", "(-len(gradient) % ranks, 0)", mistake="The zeros stand in front. The gradient begins with rank 0's shard; padding is behind it."),
    Edit("return total", "return total / dist.get_world_size()", mistake="Sum, do not average: who divides comes later."),
    Edit(_SCATTER, "        dist.all_reduce(padded, group=machine)\n        shard = padded.chunk(ranks)[dist.get_rank(machine)].clone()\n", told="a reduce-scatter for each microbatch is enough"),
    Edit(_ADD, "        total = shard\n", mistake="Only the last microbatch is there: their shards are added up."),
    Edit(_ACROSS, f"{_ACROSS}    total /= len(backwards)\n", mistake="Sum, do not average: who divides comes later."),
    Edit("padded = functional.pad(gradient, (0, -len(gradient) % ranks))", "padded = gradient[: len(gradient) // ranks * ranks]", mistake="The last elements are lost where the ranks of a machine do not divide the length: pad it."),
    Edit(_ADD, f"{_ADD.replace(_ADD, '')}{_ACROSS.replace('    dist', '        dist').replace('total', 'shard')}{_ADD}", (f"\n{_ACROSS}", "\n"), told="once a step"),
    # the whole gradient between machines
    Edit(_SCATTER, f"        dist.all_reduce(padded, group=across)\n{_SCATTER}", (f"{_ACROSS}    return", "    return"), told="between machines is a shard"),
    # added up whole, then shared out
    Edit("for backward in backwards:\n        gradient = backward()", "for gradient in [sum(backward() for backward in backwards)]:", told="that no whole gradient stays"),
    Edit("for backward in backwards:\n        gradient = backward()", "for gradient in [backward() for backward in backwards]:", told="bytes at once"),
    Edit(", group=machine", ""),
    Edit(_ACROSS, "    dist.all_reduce(total)\n"),
]

RIGHT = [
    Edit(_SCATTER, "        dist.reduce_scatter(shard, list(padded.chunk(ranks)), group=machine)\n"),
    # across by the two halves of an all-reduce
    Edit(
        _ACROSS, "    many, numbers = dist.get_world_size(across), len(total)\n"
        "    total = functional.pad(total, (0, -numbers % many))\n    part = total.new_empty(len(total) // many)\n"
        "    dist.reduce_scatter_tensor(part, total, group=across)\n"
        "    dist.all_gather_into_tensor(total, part, group=across)\n    total = total[:numbers].clone()\n",
    ),
    Edit(_ADD, "        total = shard + (0 if total is None else total)\n"),
]

EQUIVALENT = [
    Same("line 16: rounded up for down", "what is padded divides by the ranks"),
]


# %% right: sums in flight, in place
import torch
import torch.distributed as dist


def hybrid(backwards, machine, across):
    ranks, total, travelling = dist.get_world_size(machine), None, None
    for backward in backwards:
        gradient = backward().contiguous()
        whole = torch.zeros(-(-gradient.numel() // ranks) * ranks, dtype=gradient.dtype)
        whole[: gradient.numel()] = gradient
        del gradient
        if travelling:
            travelling[0].wait()
            total.add_(travelling[1])
        part = whole.new_empty(len(whole) // ranks)
        total = torch.zeros_like(part) if total is None else total
        travelling = dist.reduce_scatter_tensor(part, whole, group=machine, async_op=True), part, whole
    travelling[0].wait()
    total += travelling[1]
    dist.all_reduce(total, group=across)
    return total
