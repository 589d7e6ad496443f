"""The result of a comparison in words: what differs first, on which ranks, and where to look."""

from __future__ import annotations

from minimegatron.errors import named
from minimegatron.training.comparison.findings import PASSES, Comparison, Difference

KINDS_OF = {
    "forward": "the output of",
    "recompute": "the recomputed output of",
    "gradient": "the gradient of the output of",
    "parameter": "the gradient of",
    "sum": "",
}


def verdict(result: Comparison) -> tuple[str, str, str]:
    """(What, where, fix) of the first difference; what alone if there is none."""
    first = result.first
    counts = {phase: sum(d.phase == phase for d in result.differences) for phase in PASSES}
    parts = [f"{counts['forward']} outputs", f"{counts['gradient']} gradients of outputs"]
    parts += [f"{counts['recompute']} recomputed outputs"] if counts["recompute"] else []
    parts += [f"{counts['parameter']} gradients of parameters", "losses and norm"]
    if first is None:
        closest = max(result.differences, key=lambda d: d.distance / d.limit if d.limit else d.distance)
        far = f"largest difference {closest.distance:.0e} of a limit of {closest.limit:.0e}, {closest.name}"
        return f"{result.what}: {', '.join(parts)} agree ({far})", "", ""
    kind = f" ({first.kind})" if first.kind else ""
    subject = f"{KINDS_OF[first.phase]} {first.name}{kind}".strip()
    before = result.before(first)
    so_far = "" if before is None else f"; the one before it, {before.name}, agrees"
    note = f"; {first.note}" if first.note else ""
    what = (
        f"{result.what}: first {subject} differs, by {first.distance:.1e} of its largest element, "
        f"where {first.limit:.0e} is normal{so_far}{note}"
    )
    where = named(first.ranks)
    alone = len(first.ranks) == 1
    places = [("" if alone else f"{r}: ") + result.coordinates[r] for r in first.ranks[:8] if result.coordinates[r]]
    where += f" ({'; '.join(places)})" if places and len(first.ranks) < len(result.coordinates) else ""
    if len(first.ranks) == len(result.coordinates) > 1:
        where = f"all {len(first.ranks)} ranks"
    return what, where, _advice(first, before)


def _advice(first: Difference, before: Difference | None) -> str:
    if first.phase == "forward":
        between = f"what {first.name} does, or what lies between {before.name} and it" if before else first.name
        return f"look at {between}: a sum that is missing or made twice, a wrong part, a wrong number"
    if first.phase == "recompute":
        return f"look at what {first.name} draws or reads that is not its input: random streams, buffers"
    if first.phase == "gradient":
        after = f"the backward pass between {before.name} and {first.name}" if before else "the loss"
        return f"look at {after}: every output of the forward pass agrees"
    if first.phase == "parameter":
        return (
            "every activation and its gradient agree: look at wgrad of that module, and at the sums of gradients "
            "(parallel/data): missing, made twice, over other ranks, or divided by another count"
        )
    return "the tensors agree: look at how numbers are counted and summed over ranks"


def table(result: Comparison, rows: int = 12) -> str:
    """The first differences, one a line; `where` only where few ranks have one."""
    shown = [d for d in result.differences if d.bad]
    lines = [f"{'pass':<10} {'difference':>10} {'normal':>8}  {'ranks':<10} tensor"]
    for d in shown[:rows]:
        ranks = named(d.ranks).partition(" ")[2]
        lines.append(f"{d.phase:<10} {d.distance:>10.1e} {d.limit:>8.0e}  {ranks:<10} {d.name}")
    if len(shown) > rows:
        lines.append(f"and {len(shown) - rows} more of {len(result.differences)}; --json lists all")
    return "\n".join(lines)
