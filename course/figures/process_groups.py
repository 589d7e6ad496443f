"""Drawings of lab 01: collectives before and after, an all-reduce on a ring, the samples that each rank reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.viz.picture import FAINT, INK, arrow, blank, box, new_figure, rank_colours, styled

# ----------------------------------------------------------------------------------------- collectives before and after
# `moved` applies the collective to numbered blocks, and the picture shows its result, coloured by the rank that a block
# came from. A block that holds a sum has a stripe for every rank that contributed.
#
# | collective       | before (rank r)      | after (rank r)                              | bytes sent, buffer n |
# |------------------|----------------------|---------------------------------------------|----------------------|
# | `broadcast`      | the source has all   | every rank has all                          | n (as a ring)        |
# | `scatter`        | the source has all   | block r                                     | source: n (N-1)/N    |
# | `gather`         | block r              | the source has all                          | others: n/N          |
# | `all_gather`     | block r              | all blocks                                  | n (N-1)/N            |
# | `reduce`         | N blocks             | the source has the sums of all blocks       | others: n (a chain)  |
# | `reduce_scatter` | N blocks             | the sum of all ranks' block r               | n (N-1)/N            |
# | `all_reduce`     | N blocks             | the sums of all blocks                      | 2 n (N-1)/N          |
# | `all_to_all`     | N blocks             | block r of every rank                       | n (N-1)/N            |
#
# An all-reduce is a reduce-scatter followed by an all-gather, hence its factor of 2.

COLLECTIVES = ("broadcast", "scatter", "gather", "all_gather", "reduce", "reduce_scatter", "all_reduce", "all_to_all")
LEGEND = "left: before; right: after; colour: the rank that a block came from; several colours: a sum"


@dataclasses.dataclass(frozen=True)
class Block:
    """A number, and the ranks it came from (several where it is a sum)."""

    value: int
    origins: tuple[int, ...]


State = list[list[Block | None]]  # [rank][position]; None where a rank has nothing


def blocks_of(name: str, size: int = 4, src: int = 0) -> State:
    """The blocks of the ranks before a collective: rank r's block j is 10 (r+1) + j, so all blocks differ."""
    _check(name, size, src)
    whole = [[Block(10 * (r + 1) + j, (r,)) for j in range(size)] for r in range(size)]
    if name in ("broadcast", "scatter"):
        return [list(row) if r == src else [None] * size for r, row in enumerate(whole)]
    if name in ("gather", "all_gather"):
        return [[block if j == r else None for j, block in enumerate(row)] for r, row in enumerate(whole)]
    return [list(row) for row in whole]


def moved(name: str, before: State, src: int = 0) -> State:
    """The blocks of the ranks after the collective.

    Args:
        name: one of `COLLECTIVES`.
        before: N ranks with N positions each.
        src: the source of a broadcast or scatter, the destination of a gather or reduce.

    Raises:
        ConfigError: unknown collective, or a state that is not N x N.
    """
    size = len(before)
    _check(name, size, src)
    if any(len(row) != size for row in before):
        raise ConfigError(
            f"{name} over {size} ranks is drawn with {size} blocks a rank, not {[len(r) for r in before]}",
            fix="give N x N blocks",
        )
    nothing: list[Block | None] = [None] * size
    if name == "broadcast":
        return [list(before[src]) for _ in range(size)]
    if name == "scatter":
        return [[before[src][j] if j == r else None for j in range(size)] for r in range(size)]
    if name in ("gather", "all_gather"):
        diagonal = [before[r][r] for r in range(size)]
        return [list(diagonal) if name == "all_gather" or r == src else list(nothing) for r in range(size)]
    if name == "all_to_all":
        return [[before[j][r] for j in range(size)] for r in range(size)]
    sums = [_sum([before[r][j] for r in range(size)]) for j in range(size)]
    if name in ("reduce", "all_reduce"):
        return [list(sums) if name == "all_reduce" or r == src else list(nothing) for r in range(size)]
    return [[sums[j] if j == r else None for j in range(size)] for r in range(size)]


def sheet(names: Sequence[str] = COLLECTIVES, size: int = 4) -> Figure:
    """Draw several collectives on one page, two in a row, and a legend of the colours."""
    rows = -(-len(names) // 2)
    with styled():
        figure = new_figure(2 * 0.42 * (2 * size + 5), rows * 0.42 * (size + 1.9))
        grid = figure.subplots(rows, 2, squeeze=False)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, names, strict=False):
            before = blocks_of(name, size)
            _draw(axes, name, before, moved(name, before))
        figure.supxlabel(LEGEND, fontsize=9)
    return figure


def _check(name: str, size: int, src: int) -> None:
    if name not in COLLECTIVES:
        raise ConfigError(
            f"no picture of a collective {name!r}",
            fix=did_you_mean(name, COLLECTIVES) or f"one of {', '.join(COLLECTIVES)}",
        )
    if size < 1 or not 0 <= src < size:
        raise ConfigError(f"source {src} in a group of {size}", fix="choose 0 <= src < size")


def _sum(blocks: Sequence[Block | None]) -> Block | None:
    present = [block for block in blocks if block is not None]
    origins = sorted({origin for block in present for origin in block.origins})
    return Block(sum(block.value for block in present), tuple(origins)) if present else None


def _draw(axes: Axes, name: str, before: State, after: State) -> None:
    size = len(before)
    palette = rank_colours(size)
    right = size + 2.0
    for r in range(size):
        axes.text(-0.25, r + 0.5, f"rank {r}", ha="right", va="center", fontsize=9)
        for j in range(size):
            draw_block(axes, j, r, before[r][j], palette)
            draw_block(axes, right + j, r, after[r][j], palette)
    arrow(axes, (size + 0.25, size / 2), (right - 0.25, size / 2), linewidth=1.4)
    axes.set_title(name)
    axes.set_xlim(-1.7, right + size + 0.1)
    axes.set_ylim(size + 0.1, -0.1)
    blank(axes)


def draw_block(axes: Axes, x: float, y: float, block: Block | None, palette: list[str]) -> None:
    """Draw a block with its number, in the colour of its rank, or with a stripe of each rank in its sum."""
    if block is None:
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor="none", edgecolor=FAINT, linewidth=0.5, linestyle=":"))
        return
    if len(block.origins) == 1:
        box(axes, (x, y), (1, 1), palette[block.origins[0]], str(block.value))
        return
    width = 0.94 / len(block.origins)
    for i, origin in enumerate(block.origins):
        axes.add_patch(Rectangle((x + 0.03 + i * width, y + 0.68), width, 0.29, facecolor=palette[origin]))
    axes.add_patch(Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, fill=False, edgecolor=INK, linewidth=0.8))
    axes.text(x + 0.5, y + 0.36, str(block.value), ha="center", va="center", fontsize=9)


# ---------------------------------------------------------------------------------------------- an all-reduce on a ring
# A row for each rank, a column for each step, and in each cell all that the rank holds. Every rank has N parts, named
# A, B, C, ... In each step every rank sends one part to the next rank. For N-1 steps the receiver adds what arrives
# to its own part; then each rank has one part that is the whole sum. For N-1 further steps it replaces its own part.
#
# | in the picture      | means                                                    |
# |---------------------|----------------------------------------------------------|
# | a stripe of colours | the ranks whose numbers are in this sum                  |
# | a thick frame       | this part leaves in the next step                        |
# | an arrow            | where it goes; on it, the letter of the part             |
#
# With the numbers of `start_of`, rank r has j+1 at the decimal place r, so the digits of a sum say who is in it.

Held = list[list[Block]]  # [rank][part]
Sends = Sequence[Sequence[int]]  # [step][rank]: the part that this rank sends
GAP = 2.0  # between two columns, in blocks


def start_of(size: int) -> list[list[int]]:
    """Numbers that can be checked by hand: rank 0 has 1, 2, 3; rank 1 has 10, 20, 30; rank 2 has 100, 200, 300."""
    return [[(part + 1) * 10**rank for part in range(size)] for rank in range(size)]


def sends_of(size: int) -> list[list[int]]:
    """The part that each rank sends in each step of the usual ring: first its own, then the one that has just
    arrived."""
    return [[(rank - step) % size for rank in range(size)] for step in range(2 * (size - 1))]


def sends_in(messages: Sequence[Sequence[float]]) -> list[list[int]]:
    """The parts that were sent, found from the messages of each rank and step (`messages[rank][step]`), by `start_of`.

    Raises:
        ConfigError: a message is no part, nor a sum of parts of one letter.
    """
    return [[_part_of(number) for number in step] for step in zip(*messages, strict=True)]


def _part_of(number: float) -> int:
    digits = set(f"{number:.0f}") - {"0"}
    if len(digits) != 1 or not digits <= set("123456789"):
        raise ConfigError(f"{number:g} is no part of 1, 2, 3 ... times a power of ten, and no sum of them")
    return int(digits.pop()) - 1


def replay(start: Sequence[Sequence[int]], sends: Sends) -> list[Held]:
    """The parts that the ranks hold before the first step and after each one.

    Raises:
        ConfigError: not N-1 steps of adding and N-1 of replacing, or a part that is not there.
    """
    size = len(start)
    if len(sends) != 2 * (size - 1) or any(len(parts) != size for parts in sends):
        raise ConfigError(
            f"{len(sends)} steps of {sorted({len(parts) for parts in sends})} sends",
            fix=f"a ring of {size} ranks has {2 * (size - 1)} steps of {size} sends",
        )
    if strange := sorted({part for parts in sends for part in parts} - set(range(size))):
        raise ConfigError(f"part {strange[0]} of {size}", fix=f"parts are 0 to {size - 1}")
    held = [[Block(value, (rank,)) for value in row] for rank, row in enumerate(start)]
    states = [held]
    for step, parts in enumerate(sends):
        arriving = [(rank, held[(rank - 1) % size][parts[(rank - 1) % size]]) for rank in range(size)]
        held = [list(row) for row in held]
        for rank, block in arriving:
            part = parts[(rank - 1) % size]
            held[rank][part] = _both(held[rank][part], block) if step < size - 1 else block
        states.append(held)
    return states


def ring_steps(start: Sequence[Sequence[int]] | None = None, sends: Sends | None = None, *, title: str = "") -> Figure:
    """Draw all steps of an all-reduce on a ring, from left to right.

    Args:
        start: the numbers of each rank, one for each part; default `start_of(3)`.
        sends: for each step the part that each rank sends; default `sends_of` of as many ranks.
        title: above the picture.

    Raises:
        ConfigError: `start` and `sends` do not fit each other.
    """
    start = start_of(3) if start is None else start
    n = len(start)
    sends = sends_of(n) if sends is None else sends
    states = replay(start, sends)
    pitch = n + GAP
    width, height = len(states) * pitch - GAP, 1.25 * n
    with styled():
        figure = new_figure(0.44 * (width + 2.2), 0.5 * (height + 2.4), title)
        axes = figure.subplots()
        for column, held in enumerate(states):
            leaves = sends[column] if column < len(sends) else [None] * n
            _draw_state(axes, column * pitch, held, leaves, "start" if column == 0 else f"after step {column}")
        for column, parts in enumerate(sends):
            _draw_arrows(axes, column * pitch + n, parts)
        _bands(axes, n, pitch)
        for rank, colour in enumerate(rank_colours(n)):
            axes.add_patch(Rectangle((-0.55, 1.25 * rank + 0.1), 0.3, 0.8, facecolor=colour))
            axes.text(-0.75, 1.25 * rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
        legend = "thick frame: leaves in the next step        colours: the ranks whose numbers are in the sum"
        axes.text(width / 2, height + 0.35, legend, ha="center", va="center", fontsize=8)
        axes.set_xlim(-2.3, width + 0.1)
        axes.set_ylim(height + 0.7, -1.9)
        blank(axes)
    return figure


def _both(one: Block, other: Block) -> Block:
    return Block(one.value + other.value, tuple(sorted({*one.origins, *other.origins})))


def _letter(part: int) -> str:
    return chr(ord("A") + part)


def _draw_state(axes: Axes, x: float, held: Held, leaves: Sequence[int | None], name: str) -> None:
    n = len(held)
    axes.text(x + n / 2, -0.75, name, ha="center", va="center", fontsize=9)
    for part in range(n):
        axes.text(x + part + 0.5, -0.25, _letter(part), ha="center", va="center", fontsize=8, weight="bold")
    for rank, row in enumerate(held):
        for part, block in enumerate(row):
            draw_block(axes, x + part, 1.25 * rank, block, rank_colours(n))
        if (part_sent := leaves[rank]) is not None:
            frame = Rectangle((x + part_sent, 1.25 * rank), 1, 1, fill=False, edgecolor=INK, linewidth=2.6, zorder=3)
            axes.add_patch(frame)


def _draw_arrows(axes: Axes, x: float, parts: Sequence[int]) -> None:
    n = len(parts)
    for rank, part in enumerate(parts):
        y, to = 1.25 * rank + 0.5, 1.25 * ((rank + 1) % n) + 0.5
        axes.text(x + 0.3, y, _letter(part), ha="center", va="center", fontsize=9, weight="bold")
        arrow(axes, (x + 0.55, y), (x + GAP - 0.12, to), linewidth=1.2, shrinkA=0, shrinkB=0)


def _bands(axes: Axes, n: int, pitch: float) -> None:
    """Mark the steps that add and the steps that replace."""
    for first, text in ((0, "reduce-scatter: add what arrives"), (n - 1, "all-gather: replace with what arrives")):
        left, right = first * pitch + n + 0.1, (first + n - 1) * pitch + n - 0.1
        axes.plot([left, right], [-1.15, -1.15], color=INK, linestyle="-", linewidth=1.2)
        axes.text((left + right) / 2, -1.5, text, ha="center", va="center", fontsize=9, weight="bold")


# ----------------------------------------------------------------------------------------------- who reads which sample
# The samples of a run from left to right, a row for each part of the run. A box is one place of the stream with the
# id of its sample, in the colour of the rank that reads it; a thick line ends an epoch, a gap a step. The ids are
# those that the ranks ask for, so one sees a sample that two ranks read, or none.

Steps = Sequence[Sequence[Sequence[int]]]  # [step][rank]: the ids that this rank reads
STEP, ROW = 0.35, 2.0  # gap between two steps; height of a row; both in boxes


def who_reads(runs: Sequence[tuple[str, Steps]], num_samples: int, *, title: str = "") -> Figure:
    """Draw one row for each run; the second continues where the first has ended.

    Args:
        runs: (the text before the row, its steps).
        num_samples: of an epoch, whose ends are marked.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw.
    """
    if not any(ids for _, steps in runs for step in steps for ids in step):
        raise ConfigError("no rank reads a sample", fix="give at least one step with one id")
    ranks = max(len(step) for _, steps in runs for step in steps)
    palette, place = rank_colours(ranks), 0
    widest = max(3.2 * ranks, *(sum(map(len, itertools.chain(*steps))) + STEP * len(steps) for _, steps in runs))
    margin = 0.8 + 0.3 * max(len(name) for name, _ in runs)
    with styled():
        figure = new_figure(0.34 * (widest + margin), 0.36 * (ROW * len(runs) + 2.1) + 0.3 * bool(title), title)
        axes = figure.subplots()
        for row, (name, steps) in enumerate(runs):
            x, y = 0.0, ROW * row
            axes.text(-0.4, y + 0.5, name, ha="right", va="center", fontsize=9)
            first = sum(len(earlier) for _, earlier in runs[:row])  # steps are numbered through all rows
            for number, step in enumerate(steps):
                begin = x
                for rank, ids in enumerate(step):
                    for i in ids:
                        box(axes, (x, y), (1, 1), palette[rank], str(i))
                        x, place = x + 1, place + 1
                        if place % num_samples == 0:
                            axes.plot([x, x], [y - 0.22, y + 1.08], color=INK, linestyle="-", linewidth=3, zorder=3)
                axes.text((begin + x) / 2, y + 1.42, f"step {first + number}", ha="center", va="center", fontsize=8)
                x += STEP
        for rank in range(ranks):
            at, y = 3.2 * rank, ROW * len(runs) + 0.25
            axes.add_patch(Rectangle((at, y), 0.6, 0.6, facecolor=palette[rank]))
            axes.text(at + 0.8, y + 0.3, f"rank {rank}", va="center", fontsize=8)
        axes.text(
            0, ROW * len(runs) + 1.3, "number: id of a sample; thick line: end of an epoch", va="center", fontsize=8
        )
        axes.set_xlim(-margin, widest)
        axes.set_ylim(ROW * len(runs) + 1.7, -0.4)
        blank(axes)
    return figure
