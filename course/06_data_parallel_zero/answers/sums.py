from labkit.answers import Edit, Same

_HELD, _TREE = "held, ranks = parts.to(dtype), len(parts)", "held = parts.to(dtype)\n    while"
_FIRST, _ORDER = "held[(c + 1) % ranks, c]", "held[(c + step) % ranks, c]"
_PAIRS = "held = held[::2] + held[1::2]"

WRONG = [
    Edit(
        _HELD, "held, ranks = parts.double(), len(parts)", ("torch.stack(sums)", "torch.stack(sums).to(dtype)"),
        (_TREE, "held = parts.double()\n    while"), ("held[0]", "held[0].to(dtype)"),
        mistake="Only the result is rounded. But each partial sum is a message, and messages carry numbers of `dtype`.",
    ),
    Edit(_ORDER, "held[(c + step - 1) % ranks, c]", (_FIRST, "held[c, c]"), mistake="Chunk c begins on rank c here. In the ring it ends there: rank c keeps it."),
    Edit(_ORDER, "held[step % ranks, c]", (_FIRST, "held[1 % ranks, c]"), mistake="All chunks go through the ranks in the same order. In a ring each begins on a rank of its own."),
    Edit(_ORDER, "held[step - 1, c]", (_FIRST, "held[0, c]"), mistake="All chunks go through the ranks in the same order, from rank 0. In a ring each begins on a rank of its own."),
    Edit(_ORDER, "held[(c - step) % ranks, c]", (_FIRST, "held[(c - 1) % ranks, c]"), mistake="The ring turns the other way: rank r passes on to rank r + 1."),
    Edit(_PAIRS, "held = held[: len(held) // 2] + held[len(held) // 2 :]", mistake="Neighbours come first in the tree: 0 and 1, 2 and 3. Here rank 0 is added to the rank half the way along."),
    Edit(_PAIRS, "held = torch.cat([held[:1] + held[1:2], held[2:]])", mistake="That is no tree: one rank after the other is added to one sum."),
    Edit(_HELD, "held, ranks = parts.to(torch.bfloat16), len(parts)"),
    Edit("range(2, ranks + 1)", "range(2, ranks)"),
    Edit("torch.stack(sums)", "torch.stack(sums).float()"),
]

RIGHT = [
    Edit(_ORDER, "held[c + step - ranks, c]"),
    Edit(_PAIRS, "held = torch.stack([held[i] + held[i + 1] for i in range(0, len(held), 2)])"),
]

EQUIVALENT = [
    Same("line 21: -1 for 0", "one is left"),
]


# %% right: recursion, and all chunks at once
import torch


def ring_sum(parts, dtype):
    rows, ranks, chunks = parts.to(dtype), len(parts), torch.arange(len(parts))
    total = rows[chunks - ranks + 1, chunks]
    for step in range(2, ranks + 1):
        total = (total.float() + rows[(chunks + step) % ranks, chunks].float()).to(dtype)
    return total


def tree_sum(parts, dtype):
    if len(parts) == 1:
        return parts[0].to(dtype)
    half = len(parts) // 2
    return tree_sum(parts[:half], dtype) + tree_sum(parts[half:], dtype)
