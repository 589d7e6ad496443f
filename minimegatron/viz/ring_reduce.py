"""A ring all-reduce, step by step: a row a rank, a column a step, and in each cell all that the rank holds.

Every rank has N parts, named A, B, C, ... In each step every rank sends one part to the rank below it, the last to the
first. For N-1 steps the receiver adds what arrives to its own part; then one part on every rank is the whole sum. For
N-1 further steps it puts what arrives in the place of its own.

| in the picture      | means                                                    |
|---------------------|----------------------------------------------------------|
| a stripe of colours | the ranks whose numbers are in this sum                  |
| a thick frame       | this part leaves in the next step                        |
| an arrow            | where it goes; on it, the letter of the part             |

With the numbers of `start_of`, rank r has j+1 at the decimal place r, so the digits of a sum say who is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.collective import Block, draw_block
from minimegatron.viz.picture import INK, blank, new_figure, rank_colours, styled

Held = list[list[Block]]  # [rank][part]
Sends = Sequence[Sequence[int]]  # [step][rank]: the part that this rank sends
GAP = 2.0  # between two columns, in blocks


def start_of(size: int) -> list[list[int]]:
    """Numbers to check by hand: rank 0 has 1, 2, 3; rank 1 has 10, 20, 30; rank 2 has 100, 200, 300."""
    return [[(part + 1) * 10**rank for part in range(size)] for rank in range(size)]


def sends_of(size: int) -> list[list[int]]:
    """What each rank sends in each step of the usual ring: its own part first, then what has just arrived."""
    return [[(rank - step) % size for rank in range(size)] for step in range(2 * (size - 1))]


def sends_in(messages: Sequence[Sequence[float]]) -> list[list[int]]:
    """The parts that were sent, from what each rank has sent in each step (`messages[rank][step]`), by `start_of`.

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
    """What the ranks hold before the first step and after each one.

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
            held[rank][part] = _sum(held[rank][part], block) if step < size - 1 else block
        states.append(held)
    return states


def ring_steps(
    start: Sequence[Sequence[int]] | None = None, sends: Sends | None = None, *, size: int = 3, title: str = ""
) -> Figure:
    """All steps of an all-reduce on a ring, from left to right.

    Args:
        start: what the ranks hold, a number for each part; default `start_of(size)`.
        sends: for each step the part that each rank sends; default `sends_of(size)`.
        size: ranks, where `start` does not say it.
        title: above the picture.

    Raises:
        ConfigError: `start` and `sends` do not fit each other.
    """
    start = start_of(size) if start is None else start
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


# ------------------------------------------------------------------------------------------------------------


def _sum(one: Block, other: Block) -> Block:
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
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    for rank, part in enumerate(parts):
        y, to = 1.25 * rank + 0.5, 1.25 * ((rank + 1) % n) + 0.5
        axes.text(x + 0.3, y, _letter(part), ha="center", va="center", fontsize=9, weight="bold")
        axes.annotate("", xy=(x + GAP - 0.12, to), xytext=(x + 0.55, y), arrowprops=arrow)


def _bands(axes: Axes, n: int, pitch: float) -> None:
    """Which steps add and which replace."""
    for first, text in ((0, "reduce-scatter: add what arrives"), (n - 1, "all-gather: replace with what arrives")):
        left, right = first * pitch + n + 0.1, (first + n - 1) * pitch + n - 0.1
        axes.plot([left, right], [-1.15, -1.15], color=INK, linestyle="-", linewidth=1.2)
        axes.text((left + right) / 2, -1.5, text, ha="center", va="center", fontsize=9, weight="bold")
