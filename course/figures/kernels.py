"""Drawings of lab 07: a launch on a GPU, memory accesses, reductions, tiles, numbers of few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PAPER, arrow, blank, box, legend, new_figure, panels, sample, styled, text_on

# ----------------------------------------------------------------------------------- a launch, and the GPU that runs it
# On the left what the programmer writes: a grid of blocks, a block of warps, a warp of 32 threads. On the right what
# runs it: streaming multiprocessors (SMs), each with its own registers and shared memory, above one global memory. A
# block runs on one SM from its beginning to its end; here blocks go to the SMs in turn, an order that a GPU does not
# promise. The darker a memory is drawn, the more threads see it, and the slower it is.

WARP = 32
# What threads do in the pictures of kernels: ACTIVE ones read or add, PASSIVE numbers came along or are left over.
ACTIVE, PASSIVE = "#c8553d", "#f4d9cf"
REGISTERS, SHARED, GLOBAL = "#e3ebf0", "#b7c6d1", "#8fa5b4"


def dealt(blocks: int, sms: int) -> list[list[int]]:
    """The blocks of each SM, when they are dealt out in turn.

    Raises:
        ConfigError: a number below 1.
    """
    if blocks < 1 or sms < 1:
        raise ConfigError(f"{blocks} blocks on {sms} SMs cannot be dealt out", fix="at least one of each")
    return [list(range(sm, blocks, sms)) for sm in range(sms)]


def hierarchy(
    blocks: int = 4,
    threads: int = 64,
    sms: int = 2,
) -> Figure:
    """Draw a launch of `blocks` x `threads`, with one block in detail, and the GPU with its memories.

    Args:
        blocks: of the grid.
        threads: of a block, a multiple of 32.
        sms: drawn of the GPU.

    Raises:
        ConfigError: a number below 1, or threads that are no whole warps.
    """
    if threads < WARP or threads % WARP:
        raise ConfigError(f"a block of {threads} threads is not made of warps", fix="a multiple of 32")
    runs = dealt(blocks, sms)
    with styled():
        figure = new_figure(10.4, 4.4, "One launch, and the GPU that runs it")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
        _launch(left, blocks, threads)
        _gpu(right, runs)
    return figure


def _launch(axes: Axes, blocks: int, threads: int) -> None:
    axes.set_title("What you launch")
    width, gap = 40.0, 1.0
    each = (width - gap * (blocks + 1)) / blocks
    box(axes, (0, 22), (width, 6.5), PAPER, edge=INK)
    _text(axes, 0.6, 27.6, f"grid: {blocks} blocks", bold=True)
    for block in range(blocks):
        corner = gap + block * (each + gap), 22.7
        box(axes, corner, (each, 3.6), REGISTERS, f"block {block}", edge=INK, fontsize=8)
    warps = threads // WARP
    bottom = 20.4 - 6.4 * warps - 2.4
    for x, opened in ((gap, 0.0), (gap + each, width)):
        axes.plot([x, opened], [22.7, 20.4], "-", color=INK, linewidth=0.6)
    box(axes, (0, bottom), (width, 20.4 - bottom), PAPER, edge=INK)
    _text(axes, 0.6, 19.4, f"block 0: {threads} threads, in warps of {WARP}", bold=True)
    for warp in range(warps):
        y = 18.3 - 6.4 * (warp + 1) + 1.6
        _text(axes, 1.0, y + 3.8, f"warp {warp}: threads {WARP * warp} to {WARP * warp + WARP - 1}, one instruction at "
              "a time for all of them", size=7.5)  # fmt: skip
        for lane in range(WARP):
            thread = WARP * warp + lane
            text = f"{thread}" if lane % 4 == 0 or lane == WARP - 1 else ""
            box(axes, (1 + lane * 1.19, y), (1.19, 2.6), PASSIVE, text, fontsize=6, edge=INK)
    block, thread = blocks - 1, 5
    _text(
        axes, 0.6, bottom - 1.6, "Which number is a thread's own?  i = blockIdx.x * blockDim.x + threadIdx.x", bold=True
    )
    _text(axes, 0.6, bottom - 3.4, f"thread {thread} of block {block}: i = {block} * {threads} + {thread} = "
          f"{block * threads + thread}")  # fmt: skip
    axes.set_xlim(-0.3, width + 0.3)
    axes.set_ylim(min(bottom - 4, 0) - 0.4, 29)
    blank(axes)
    axes.set_aspect("auto")


def _gpu(axes: Axes, runs: Sequence[Sequence[int]]) -> None:
    axes.set_title("What runs it")
    width, gap = 40.0, 1.2
    each = (width - gap * (len(runs) + 1)) / len(runs)
    registers, shared, whole = "256 KiB", "up to 228 KiB", "80 GB"  # of an H100
    box(axes, (0, 8.6), (width, 19.9), PAPER, edge=INK)
    _text(axes, 0.6, 27.6, "GPU: many SMs (an H100 has 132)", bold=True)
    for sm, assigned in enumerate(runs):
        x = gap + sm * (each + gap)
        box(axes, (x, 9.4), (each, 17.2), "white", edge=INK)
        _text(axes, x + each / 2, 25.6, f"SM {sm} runs", centre=True, bold=True)
        _text(
            axes, x + each / 2, 24.0, "block " + ", ".join(map(str, assigned)) if assigned else "nothing", centre=True
        )
        box(axes, (x + 0.8, 17.0), (each - 1.6, 5.6), REGISTERS, f"registers, {registers}\none thread sees its own",
            edge=INK, fontsize=7.5)  # fmt: skip
        box(axes, (x + 0.8, 10.2), (each - 1.6, 5.6), SHARED, f"shared memory, {shared}\nthe threads of one block\n"
            "see their part of it", edge=INK, fontsize=7.5)  # fmt: skip
        arrow(axes, (x + each / 2, 9.4), (x + each / 2, 5.9), arrowstyle="<->")
    box(axes, (0, 0), (width, 5.9), GLOBAL, f"global memory, {whole}: all threads see it\nx, gamma and y lie here; "
        "far away, and slow", edge=INK, fontsize=9)  # fmt: skip
    axes.set_xlim(-0.3, width + 0.3)
    axes.set_ylim(-0.4, 29)
    blank(axes)
    axes.set_aspect("auto")


def _text(
    axes: Axes, x: float, y: float, text: str, *, size: float = 8.5, centre: bool = False, bold: bool = False
) -> None:
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, ha="center" if centre else "left", va="center", fontsize=size, weight=weight, color=INK)


# ------------------------------------------------------------------------------------------ what a warp asks memory for
# Memory is fetched in whole *sectors* of 32 bytes, eight fp32 numbers; a thick border is drawn around each. A square
# is a number of a matrix stored row by row. A thread (its number stands in the square) reads a dark one; a light one
# is fetched because it lies in the same sector; a white one is not fetched.

SECTOR = 8  # numbers that are fetched together
ASKED, CAME, REST = ACTIVE, PASSIVE, "white"


def sectors(shape: tuple[int, int], asked: Sequence[int]) -> set[int]:
    """The sectors that contain these places of a matrix stored row by row.

    Raises:
        ConfigError: a place outside of it.
    """
    if bad := [i for i in asked if not 0 <= i < shape[0] * shape[1]]:
        raise ConfigError(
            f"a matrix of {shape[0]} x {shape[1]} has no place {bad[0]}", fix=f"places 0 to {shape[0] * shape[1] - 1}"
        )
    return {i // SECTOR for i in asked}


def access_map(shape: tuple[int, int], ways: Mapping[str, Sequence[int]]) -> Figure:
    """Draw one panel for each way of reading.

    Args:
        shape: rows and columns of the matrix; a row consists of whole sectors.
        ways: {title: for each thread the place that it reads, counted row by row}.

    Raises:
        ConfigError: nothing to draw, a place outside of the matrix, or rows that are no whole sectors.
    """
    if not ways:
        raise ConfigError("no access to draw", fix="give at least one")
    if shape[1] % SECTOR:
        raise ConfigError(f"rows of {shape[1]} numbers are not made of sectors of {SECTOR}", fix="a multiple of it")
    for asked in ways.values():
        sectors(shape, asked)
    with styled():
        figure = new_figure(1.2 + 0.27 * shape[1], 0.5 + len(ways) * (0.9 + 0.27 * shape[0]))
        for axes, (title, asked) in panels(figure, {title: (title, asked) for title, asked in ways.items()}, down=True):
            fetched = sectors(shape, asked)
            _matrix(axes, shape, {place: thread for thread, place in enumerate(asked)}, fetched)
            what = f"{len(fetched)} sector{'s' * (len(fetched) != 1)} (of {SECTOR} numbers)"
            verb = "is" if len(fetched) == 1 else "are"
            axes.set_title(f"{title}: {len(asked)} threads ask, {what} {verb} fetched", fontsize=10)
        looks = (("asked for, by this thread", ASKED), ("comes along", CAME), ("not fetched", REST))
        sector_look = sample("one sector", "none", linewidth=2.0)
        legend(figure, [*(sample(*look, linewidth=0.4) for look in looks), sector_look])
    return figure


def _matrix(axes: Axes, shape: tuple[int, int], thread: Mapping[int, int], fetched: set[int]) -> None:
    rows, cols = shape
    for place in range(rows * cols):
        row, col = divmod(place, cols)
        colour = ASKED if place in thread else CAME if place // SECTOR in fetched else REST
        axes.add_patch(Rectangle((col, row), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.3))
        if place in thread:
            axes.text(
                col + 0.5, row + 0.5, f"{thread[place]}", ha="center", va="center", fontsize=7, color=text_on(colour)
            )
    for place in range(0, rows * cols, SECTOR):
        row, col = divmod(place, cols)
        border = Rectangle((col, row), SECTOR, 1, fill=False, edgecolor=INK, linewidth=1.6)
        axes.add_patch(border)
    axes.set_xlim(-0.1, cols + 0.1)
    axes.set_ylim(rows + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xticks([c + 0.5 for c in range(0, cols, SECTOR)], [f"{c}" for c in range(0, cols, SECTOR)])
    axes.set_yticks([r + 0.5 for r in range(rows)], [f"{r}" for r in range(rows)])
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("column", fontsize=8)
    axes.set_ylabel("row", fontsize=8)


# ----------------------------------------------------------------------------------- a sum as a tree and as a butterfly
# Both pictures are read from the top to the bottom: a column is a thread, a row is what the threads hold after a step,
# and a line leads from a number to the sum that it goes into.
#
# | picture          | threads at work     | between two steps                                 | in the end           |
# |------------------|---------------------|---------------------------------------------------|----------------------|
# | `reduction_tree` | n/2, n/4, ..., 1    | a barrier: a thread reads what another one wrote  | thread 0 has the sum |
# | `butterfly`      | all n, in each step | nothing: a shuffle synchronises its threads       | all n have the sum   |

_HEIGHT, _STEP = 0.62, 1.7  # of a row of numbers, and from one row to the next


def tree_steps(values: Sequence[float]) -> list[list[float]]:
    """The numbers of the threads at first and after each step: below s, thread t adds the number of thread t + s.

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
    """The numbers of the lanes at first and after each step: lane i adds the number of lane i ^ o.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows, o = [list(values)], _power(values) // 2
    while o:
        before = rows[-1]
        rows.append([before[i] + before[i ^ o] for i in range(len(values))])
        o //= 2
    return rows


def reduction_tree(values: Sequence[float]) -> Figure:
    """Draw the tree, with a barrier before each step and one before the sum is read.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows = tree_steps(values)
    n = len(values)
    with styled():
        figure = new_figure(7.6, 1.1 + 0.78 * len(rows), "A tree in shared memory")
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
        looks = (("a part, of its thread", SHARED), ("added in this step", ACTIVE), ("left over", PASSIVE))
        legend(figure, [sample(*look, linewidth=None) for look in looks])
    return figure


def butterfly(values: Sequence[float]) -> Figure:
    """Draw the butterfly: all lanes add in every step, and all have the sum.

    Raises:
        ConfigError: the number of values is no power of two.
    """
    rows = butterfly_steps(values)
    n = len(values)
    with styled():
        figure = new_figure(7.6, 0.9 + 0.78 * len(rows), "A butterfly of shuffles")
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
    """Draw a line from a number of the row above to the sum in this one."""
    tail, head = (source + 0.5, y + _STEP), (target + 0.5, y + _HEIGHT)
    arrow(axes, tail, head, linewidth=width, shrinkA=0, shrinkB=0, mutation_scale=7)


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


# ---------------------------------------------------------------------------------------------------- matrices in tiles
# `score_tiles`: the s x s scores of causal attention. A row of tiles is a block of queries, which stays on the chip; a
# tile is computed when its keys and values are loaded. Tiles beyond the diagonal are skipped.
#
# `scaled_tiles`: numbers before and after a cast with one scale for each tile; numbers that become 0 are marked.

FULL, HALF, HIDDEN = ACTIVE, PASSIVE, "white"
LOST = "///"  # the hatch of what was a number, and is 0


def kinds(s: int, rows: int, cols: int) -> list[list[str]]:
    """The kinds of tiles of each block of queries, from the top: "full", "half" (the mask cuts it) or "hidden".

    Raises:
        ConfigError: the tiles do not divide the tokens.
    """
    if min(s, rows, cols) < 1 or s % rows or s % cols:
        raise ConfigError(f"tiles of {rows} x {cols} do not divide {s} tokens", fix="sizes that divide s")
    return [
        [
            "hidden" if key > query + rows - 1 else "full" if key + cols - 1 <= query else "half"
            for key in range(0, s, cols)
        ]
        for query in range(0, s, rows)
    ]


def score_tiles(s: int, rows: int, cols: int) -> Figure:
    """Draw the tiles of s x s causal scores, and beside each block of queries the keys that are loaded for it.

    Raises:
        ConfigError: the tiles do not divide the tokens.
    """
    table = kinds(s, rows, cols)
    with styled():
        figure = new_figure(7.2, 4.2, f"Causal scores of {s} tokens, in blocks of {rows} queries x {cols} keys")
        axes = figure.subplots()
        for query in range(s):
            for key in range(s):
                kind = table[query // rows][key // cols]
                colour = {"full": FULL, "half": FULL if key <= query else HALF, "hidden": HIDDEN}[kind]
                axes.add_patch(Rectangle((key, query), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.2))
        for block, of in enumerate(table):
            for tile in range(len(of)):
                corner = tile * cols, block * rows
                axes.add_patch(Rectangle(corner, cols, rows, fill=False, edgecolor=INK, linewidth=1.8))
            seen = (len(of) - of.count("hidden")) * cols
            text = f"queries {block * rows} to {(block + 1) * rows - 1}: loads {seen} keys, {seen} values"
            axes.text(s + 0.3, (block + 0.5) * rows, text, ha="left", va="center", fontsize=8)
        axes.set_xlim(-0.1, s + 6.6 * s / 8)
        axes.set_ylim(s + 0.1, -0.1)
        axes.set_aspect("equal")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
        axes.set_xticks([key + 0.5 for key in range(s)], [str(key) for key in range(s)])
        axes.set_yticks([query + 0.5 for query in range(s)], [str(query) for query in range(s)])
        axes.set_xlabel("key", fontsize=8, loc="left")
        axes.set_ylabel("query", fontsize=8)
        looks = (("a score that counts", FULL), ("computed, then set to -∞", HALF), ("never computed", HIDDEN))
        legend(figure, [sample(*look, linewidth=0.4) for look in looks])
    return figure


Blocks = Sequence[Sequence[float]]
_PITCH = 4.6  # from one state of `online_softmax` to the next


def softmax_states(scores: Blocks, values: Blocks) -> list[tuple[float, float, float]]:
    """(m, l, o) of one query before the first block of keys and after each.

    Raises:
        ConfigError: a block without keys, or not as many values as scores.
    """
    if not scores or [len(block) for block in scores] != [len(block) for block in values] or not all(map(len, scores)):
        raise ConfigError("each block needs as many values as scores", fix="at least one of each")
    states = [(-math.inf, 0.0, 0.0)]
    for block, of in zip(scores, values, strict=True):
        before, total, out = states[-1]
        m = max(before, *block)
        shrink, weights = math.exp(before - m), [math.exp(score - m) for score in block]
        states.append(
            (m, total * shrink + sum(weights), out * shrink + sum(w * v for w, v in zip(weights, of, strict=True)))
        )
    return states


def online_softmax(scores: Blocks, values: Blocks) -> Figure:
    """Draw what one query keeps, m, l and o, and what each block of keys does to it.

    Raises:
        ConfigError: a block without keys, or not as many values as scores.
    """
    states = softmax_states(scores, values)
    with styled():
        figure = new_figure(9.0, 3.6, "One query: m, l and o after each block of keys")
        axes = figure.subplots()
        for row, text in ((5.0, "score"), (4.0, "e^(score - m)"), (3.0, "value"), (1.6, "m"), (0.8, "l"), (0.0, "o")):
            axes.text(-1.2, row + 0.3, text, ha="right", va="center", fontsize=9)
        for i, state in enumerate(states):
            centre = _PITCH * i
            for row, number in zip((1.6, 0.8, 0.0), state, strict=True):
                text = "-∞" if number == -math.inf else f"{number:.4g}"
                box(axes, (centre - 0.95, row), (1.9, 0.6), SHARED, text, edge=INK)
            if i:
                _block(axes, centre, i, scores[i - 1], values[i - 1], state[0])
                before = states[i - 1][0]
                factor = f"l, o times\ne^({before:g} - {state[0]:g}) = {math.exp(before - state[0]):.3f}"
                arrow(axes, (centre - _PITCH + 0.95, 0.7), (centre - 0.95, 0.7))
                said = "nothing yet" if before == -math.inf else factor
                axes.text(centre - _PITCH / 2, 0.85, said, ha="center", va="bottom", fontsize=8)
        m, total, out = states[-1]
        end = _PITCH * len(scores) + 0.95
        axes.text(end + 0.25, 0.7, f"out = o / l = {out / total:.4g}\nlse = m + log l = {m + math.log(total):.4g}",
                  ha="left", va="center", fontsize=9)  # fmt: skip
        axes.set_xlim(-3.0, end + 4.2)
        axes.set_ylim(-0.1, 6.4)
        blank(axes)
        axes.set_aspect("auto")
    return figure


def _block(axes: Axes, centre: float, number: int, scores: Sequence[float], values: Sequence[float], m: float) -> None:
    """Draw the keys of a block: score, weight and value of each."""
    axes.text(centre, 5.85, f"block {number}", ha="center", va="bottom", fontsize=9)
    for i, (score, value) in enumerate(zip(scores, values, strict=True)):
        x = centre - len(scores) / 2 + i
        box(axes, (x, 5.0), (1, 0.6), "white", f"{score:g}", edge=INK)
        box(axes, (x, 4.0), (1, 0.6), PASSIVE, f"{math.exp(score - m):.3g}", edge=INK)
        box(axes, (x, 3.0), (1, 0.6), "white", f"{value:g}", edge=INK)
    arrow(axes, (centre, 2.95), (centre, 2.25))


Numbers = Sequence[Sequence[float]]


def scaled_tiles(
    before: Numbers, ways: Sequence[tuple[str, tuple[int, int], Numbers, Numbers]], title: str = ""
) -> Figure:
    """Draw a matrix before and after a cast to FP8 and back, for each tiling.

    Args:
        before: the numbers, row by row.
        ways: for each its name, the tile (rows, columns), the scales [tiles down][tiles across], and the numbers after.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a matrix of another shape.
    """
    shape = len(before), len(before[0]) if before else 0
    if not ways or not all(shape):
        raise ConfigError("no tiles to draw", fix="give a matrix and at least one way to cut it")
    if bad := [name for name, _, _, after in ways if (len(after), len(after[0])) != shape]:
        raise ConfigError(f"{bad[0]!r} has another shape than the matrix before", fix=f"{shape[0]} x {shape[1]}")
    panels = [("before", shape, None, before), *ways]
    with styled():
        figure = new_figure(0.6 + 0.72 * shape[1], len(panels) * (0.55 + 0.62 * shape[0]) + 0.4, title)
        drawn = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (name, tile, scales, numbers) in zip(drawn, panels, strict=True):
            _cells(axes, before, numbers, tile[0])
            if scales is not None:
                _scales(axes, shape, tile, scales)
            axes.set_title(name, fontsize=10)
            axes.set_xlim(-0.05, shape[1] + 0.05)
            axes.set_ylim(1.35 * shape[0] + 0.05, -0.05)
            blank(axes)
            axes.set_aspect("auto")
        lost = sample("was not 0, and is 0 now", PASSIVE, LOST, linewidth=None)
        legend(figure, [lost, sample("one tile, its scale below", "none", linewidth=2.0)])
    return figure


def _top(row: int, high: int) -> float:
    """The top of a row. Rows of one tile stand close together; below each tile there is room for its scale."""
    return 0.8 * row + 0.55 * (row // high)


def _cells(axes: Axes, before: Numbers, numbers: Numbers, high: int) -> None:
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            lost = number == 0 and before[r][c] != 0
            colour, pattern, text = PASSIVE if lost else "white", LOST if lost else "", f"{number + 0.0:.4g}"
            box(axes, (c, _top(r, high)), (1, 0.8), colour, text, edge=INK, fontsize=8, pattern=pattern)


def _scales(axes: Axes, shape: tuple[int, int], tile: tuple[int, int], scales: Numbers) -> None:
    (rows, cols), (m, n) = shape, tile
    for i, across in enumerate(scales):
        for j, scale in enumerate(across):
            top, left = i * m, j * n
            bottom, right = min(rows, top + m), min(cols, left + n)
            height = 0.8 * (bottom - top)
            border = Rectangle((left, _top(top, m)), right - left, height, fill=False, edgecolor=INK, linewidth=2.2)
            axes.add_patch(border)
            axes.text((left + right) / 2, _top(top, m) + height + 0.26, _scale(scale), ha="center",
                      va="center", fontsize=8)  # fmt: skip


def _scale(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f"scale 2^{exponent - 1}" if fraction == 0.5 else f"scale {scale:.4g}"


# -------------------------------------------------------------------------------------------------- numbers in few bits
# `number_lines`: the numbers that a format has. Between any two powers of two there are equally many, so their steps
# double with each; below 2^lowest the steps stay equal, down to 0.
#
# `error_bars`: how far a cast is off, recipe by recipe.

Format = tuple[int, int, float]  # mantissa bits, lowest exponent, largest number
_BARS = (("white", ""), ("#c8c8c8", "///"), ("#555555", ""))


def numbers_of(format: Format, low: float, high: float) -> list[float]:
    """The numbers of a format from `low` to `high`, neither of them negative, ascending."""
    mantissa, lowest, top = format
    found, exponent = [m * 2.0 ** (lowest - mantissa) for m in range(2**mantissa)], lowest
    while 2.0**exponent <= min(high, top):
        found += [(1 + m / 2**mantissa) * 2.0**exponent for m in range(2**mantissa)]
        exponent += 1
    return [number for number in found if low <= number <= min(high, top)]


def number_lines(formats: Mapping[str, Format], ranges: Sequence[tuple[float, float]], title: str = "") -> Figure:
    """Draw a mark for each number of each format, in a panel for each range.

    Raises:
        ConfigError: no format, or a range without a number.
    """
    if not formats or not ranges:
        raise ConfigError("no numbers to draw", fix="give a format and a range")
    with styled():
        figure = new_figure(8.6, 0.8 + (0.45 + 0.34 * len(formats)) * len(ranges), title)
        for axes, (low, high) in zip(figure.subplots(len(ranges), 1, squeeze=False)[:, 0], ranges, strict=True):
            for place, (name, format) in enumerate(formats.items()):
                found = numbers_of(format, low, high)
                if not found:
                    raise ConfigError(f"{name} has no number from {low:g} to {high:g}", fix="another range")
                axes.plot([low, high], [place, place], "-", color=INK, linewidth=0.6)
                axes.plot(found, [place] * len(found), "|", color=INK, markersize=11, markeredgewidth=1.6)
            axes.set_yticks(range(len(formats)), [*formats])
            axes.set_ylim(len(formats) - 0.4, -0.6)
            span = high - low
            axes.set_xlim(low - 0.01 * span, high + 0.01 * span)
            axes.grid(visible=False)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.set_title(f"from {low:g} to {high:g}", fontsize=9)
    return figure


def error_bars(tensors: Sequence[str], errors: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Draw relative errors on a logarithmic axis: a group of bars for each tensor, a bar for each recipe, its value
    above.

    Args:
        tensors: names of the groups.
        errors: {recipe: for each tensor a number above 0}; at most three recipes.

    Raises:
        ConfigError: nothing to draw, too many recipes, or an error that has no place on the axis.
    """
    if not errors or not tensors or len(errors) > len(_BARS):
        raise ConfigError(f"{len(errors)} recipes on {len(tensors)} tensors", fix=f"1 to {len(_BARS)} recipes")
    if bad := [name for name, row in errors.items() if len(row) != len(tensors) or not all(e > 0 for e in row)]:
        raise ConfigError(f"the errors of {bad[0]!r} cannot be drawn", fix="one above 0 for each tensor")
    width = 0.8 / len(errors)
    with styled():
        figure = new_figure(8.0, 3.2, title)
        axes = figure.subplots()
        for i, ((name, row), (colour, pattern)) in enumerate(zip(errors.items(), _BARS, strict=False)):
            places = [place + width * (i - (len(errors) - 1) / 2) for place in range(len(tensors))]
            axes.bar(places, row, 0.92 * width, color=colour, hatch=pattern, edgecolor=INK, linewidth=0.7, label=name)
            for place, error in zip(places, row, strict=True):
                axes.text(place, error * 1.1, f"{error:.1%}", ha="center", va="bottom", fontsize=8)
        axes.set_yscale("log")
        most = max(max(row) for row in errors.values())
        axes.set_ylim(min(min(row) for row in errors.values()) / 3, 3 * most)
        axes.set_xticks(range(len(tensors)), list(tensors))
        axes.set_ylabel("relative error")
        figure.legend(loc="outside right upper")
    return figure
