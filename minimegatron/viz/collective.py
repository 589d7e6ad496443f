"""Each collective before and after: four ranks, blocks of data with their numbers, coloured by the rank they came from.

What is drawn is computed, not remembered: `moved` applies the collective to the blocks, and the picture shows its
result. A block that holds a sum carries a stripe of every rank that contributed.

| collective       | before (rank r)      | after (rank r)                              | bytes sent, buffer n |
|------------------|----------------------|---------------------------------------------|----------------------|
| `broadcast`      | the source has all   | every rank has all                          | n (as a ring)        |
| `scatter`        | the source has all   | block r                                     | source: n (N-1)/N    |
| `gather`         | block r              | the source has all                          | others: n/N          |
| `all_gather`     | block r              | all blocks                                  | n (N-1)/N            |
| `reduce`         | N blocks             | the source has the sums of all blocks       | others: n (a chain)  |
| `reduce_scatter` | N blocks             | the sum of all ranks' block r               | n (N-1)/N            |
| `all_reduce`     | N blocks             | the sums of all blocks                      | 2 n (N-1)/N          |
| `all_to_all`     | N blocks             | block r of every rank                       | n (N-1)/N            |

An all-reduce is a reduce-scatter followed by an all-gather, which is where its factor of 2 comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.viz.picture import FAINT, INK, blank, box, new_figure, rank_colours, styled

COLLECTIVES = ("broadcast", "scatter", "gather", "all_gather", "reduce", "reduce_scatter", "all_reduce", "all_to_all")
LEGEND = "left: before; right: after; colour: the rank that a block came from; several colours: a sum"


@dataclasses.dataclass(frozen=True)
class Block:
    """A number, and the ranks it came from (several where it is a sum)."""

    value: int
    origins: tuple[int, ...]


State = list[list[Block | None]]  # [rank][position]; None where a rank has nothing


def start_of(name: str, size: int = 4, src: int = 0) -> State:
    """What the ranks hold before: rank r's block j is the number 10 (r+1) + j, so every block can be told apart."""
    _check(name, size, src)
    whole = [[Block(10 * (r + 1) + j, (r,)) for j in range(size)] for r in range(size)]
    if name in ("broadcast", "scatter"):
        return [list(row) if r == src else [None] * size for r, row in enumerate(whole)]
    if name in ("gather", "all_gather"):
        return [[block if j == r else None for j, block in enumerate(row)] for r, row in enumerate(whole)]
    return [list(row) for row in whole]


def moved(name: str, before: State, src: int = 0) -> State:
    """What the ranks hold after the collective.

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


def before_after(name: str, size: int = 4, *, before: State | None = None, src: int = 0) -> Figure:
    """One collective: the ranks' blocks before and after.

    Args:
        name: one of `COLLECTIVES`.
        size: number of ranks.
        before: what they hold; default `start_of(name, size, src)`.
        src: the source (of a gather or reduce: the destination).

    Raises:
        ConfigError: unknown collective, source out of range, or a state that is not N x N.
    """
    before = start_of(name, size, src) if before is None else before
    with styled():
        figure = new_figure(0.42 * (2 * len(before) + 5), 0.42 * (len(before) + 1.6))
        _draw(figure.subplots(), name, before, moved(name, before, src))
    return figure


def sheet(names: Sequence[str] = COLLECTIVES, size: int = 4) -> Figure:
    """Several collectives on one page, two a row, and what colours mean."""
    rows = -(-len(names) // 2)
    with styled():
        figure = new_figure(2 * 0.42 * (2 * size + 5), rows * 0.42 * (size + 1.9))
        grid = figure.subplots(rows, 2, squeeze=False)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, names, strict=False):
            before = start_of(name, size)
            _draw(axes, name, before, moved(name, before))
        figure.supxlabel(LEGEND, fontsize=9)
    return figure


# ------------------------------------------------------------------------------------------------------------


def _check(name: str, size: int, src: int) -> None:
    if name not in COLLECTIVES:
        raise ConfigError(
            f"no picture of a collective {name!r}",
            fix=did_you_mean(name, COLLECTIVES) or f"one of {', '.join(COLLECTIVES)}",
        )
    if size < 1 or not 0 <= src < size:
        raise ConfigError(f"source {src} in a group of {size}", fix="choose 0 <= src < size")


def _sum(blocks: Sequence[Block | None]) -> Block | None:
    there = [block for block in blocks if block is not None]
    origins = sorted({origin for block in there for origin in block.origins})
    return Block(sum(block.value for block in there), tuple(origins)) if there else None


def _draw(axes: Axes, name: str, before: State, after: State) -> None:
    size = len(before)
    palette = rank_colours(size)
    right = size + 2.0
    for r in range(size):
        axes.text(-0.25, r + 0.5, f"rank {r}", ha="right", va="center", fontsize=9)
        for j in range(size):
            draw_block(axes, j, r, before[r][j], palette)
            draw_block(axes, right + j, r, after[r][j], palette)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
    axes.annotate("", xy=(right - 0.25, size / 2), xytext=(size + 0.25, size / 2), arrowprops=arrow)
    axes.set_title(name)
    axes.set_xlim(-1.7, right + size + 0.1)
    axes.set_ylim(size + 0.1, -0.1)
    blank(axes)


def draw_block(axes: Axes, x: float, y: float, block: Block | None, palette: list[str]) -> None:
    """A block with its number: in the colour of its rank, or with a stripe of each that is in its sum."""
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
