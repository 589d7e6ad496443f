"""How many numbers become one sum: the tree of a block in shared memory, and the butterfly of a warp's shuffles.

Both pictures are read from the top to the bottom: a column is a thread, a row is what the threads hold after a step,
and a line leads from a number to the sum that it goes into.

| picture          | threads at work     | between two steps                                 | in the end           |
|------------------|---------------------|---------------------------------------------------|----------------------|
| `reduction_tree` | n/2, n/4, ..., 1    | a barrier: a thread reads what another one wrote  | thread 0 has the sum |
| `butterfly`      | all n, in each step | nothing: a shuffle waits for those that take part | all n have the sum   |
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.cuda import ACTIVE, PASSIVE, SHARED
from minimegatron.viz.picture import INK, blank, box, new_figure, styled

_HEIGHT, _STEP = 0.62, 1.7  # of a row of numbers, and from one row to the next


def tree_steps(values: Sequence[float]) -> list[list[float]]:
    """What the threads hold at first and after each step: below s, thread t adds what thread t + s holds.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows, s = [list(values)], _power(values) // 2
    while s:
        before = rows[-1]
        rows.append([before[t] + before[t + s] if t < s else before[t] for t in range(len(values))])
        s //= 2
    return rows


def butterfly_steps(values: Sequence[float]) -> list[list[float]]:
    """What the lanes hold at first and after each step: lane i adds what lane i ^ o holds.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows, o = [list(values)], _power(values) // 2
    while o:
        before = rows[-1]
        rows.append([before[i] + before[i ^ o] for i in range(len(values))])
        o //= 2
    return rows


def reduction_tree(values: Sequence[float], title: str = "A tree in shared memory") -> Figure:
    """The tree, with a barrier before each step and one before the sum is read.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows = tree_steps(values)
    n = len(values)
    with styled():
        figure = new_figure(7.6, 1.1 + 0.78 * len(rows), title)
        axes = figure.subplots()
        _columns(axes, "thread", n)
        for step, row in enumerate(rows):
            s, y = n >> step, -_STEP * step
            if step:
                for t in range(s):
                    _line(axes, t, t, y, 0.8)
                    _line(axes, t + s, t, y, 1.4)
            for t, value in enumerate(row):
                colour = SHARED if not step else ACTIVE if t < s else PASSIVE
                box(axes, (t + 0.1, y), (0.8, _HEIGHT), colour, f"{value:g}", edge=INK)
            _beside(
                axes, n, y, f"s = {s}: {s} thread{'s' * (s > 1)} add{'s' * (s == 1)}" if step else "parts, at first"
            )
            _barrier(axes, n, y - 0.26)
        _done(axes, n, len(rows) - 0.75)
        legend = ((SHARED, "a part, of its thread"), (ACTIVE, "added in this step"), (PASSIVE, "left over"))
        patches = [Patch(facecolor=colour, edgecolor=INK, label=label) for colour, label in legend]
        figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def butterfly(values: Sequence[float], title: str = "A butterfly of shuffles") -> Figure:
    """The butterfly: all lanes add in every step, and all have the sum.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows = butterfly_steps(values)
    n = len(values)
    with styled():
        figure = new_figure(7.6, 0.9 + 0.78 * len(rows), title)
        axes = figure.subplots()
        _columns(axes, "lane", n)
        for step, row in enumerate(rows):
            o, y = n >> step, -_STEP * step
            for i, value in enumerate(row):
                if step:
                    _line(axes, i, i, y, 0.8)
                    _line(axes, i ^ o, i, y, 1.4)
                box(axes, (i + 0.1, y), (0.8, _HEIGHT), ACTIVE if step else SHARED, f"{value:g}", edge=INK)
            _beside(axes, n, y, f"o = {o}: lane i adds\nwhat lane i ^ {o} holds" if step else "v, at first")
        _done(axes, n, len(rows) - 1)
    return figure


def _power(values: Sequence[float]) -> int:
    n = len(values)
    if n < 1 or n & (n - 1):
        raise ConfigError(f"{n} numbers cannot be halved down to one", fix="a power of two of them")
    return n


def _columns(axes: Axes, what: str, n: int) -> None:
    for i in range(n):
        axes.text(i + 0.5, _HEIGHT + 0.25, f"{what} {i}", ha="center", va="bottom", fontsize=7.5)


def _line(axes: Axes, source: int, target: int, y: float, width: float) -> None:
    """From a number of the row above to the sum in this one."""
    tail, head = (source + 0.5, y + _STEP), (target + 0.5, y + _HEIGHT)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    axes.annotate("", head, tail, arrowprops=arrow)


def _barrier(axes: Axes, n: int, y: float) -> None:
    axes.plot([0, n], [y, y], color=INK, linestyle="--", linewidth=1.0)
    axes.text(n + 0.15, y, "__syncthreads()", ha="left", va="center", fontsize=7.5, family="monospace")


def _beside(axes: Axes, n: int, y: float, text: str) -> None:
    axes.text(n + 0.15, y + _HEIGHT / 2, text, ha="left", va="center", fontsize=8)


def _done(axes: Axes, n: int, steps: float) -> None:
    axes.set_xlim(-0.1, n + 2.9)
    axes.set_ylim(-_STEP * steps - 0.1, _HEIGHT + 0.8)
    blank(axes)
    axes.set_aspect("auto")
