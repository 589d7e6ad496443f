"""What a kernel's launch is made of, and where on the chip its pieces live: grid, block, warp, thread.

On the left what the programmer writes: a grid of blocks, a block of warps, a warp of 32 threads. On the right what runs
it: streaming multiprocessors (SMs), each with registers and shared memory of its own, above one global memory. A block
runs on one SM from its beginning to its end; the number in an SM says which blocks it gets here. (In which order a GPU
deals them out is not promised; the picture deals them in turn.)

The darker a kind of memory is drawn, the more threads see it, and the slower it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PAPER, blank, box, new_figure, styled

WARP = 32
# What threads do in the pictures of kernels: ACTIVE ones read or add, PASSIVE numbers came along or are left over.
ACTIVE, PASSIVE = "#c8553d", "#f4d9cf"
REGISTERS, SHARED, GLOBAL = "#e3ebf0", "#b7c6d1", "#8fa5b4"


def dealt(blocks: int, sms: int) -> list[list[int]]:
    """Which blocks each SM runs, when they are dealt out in turn.

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
    sizes: Sequence[str] = ("256 KiB", "up to 228 KiB", "80 GB"),
    title: str = "One launch, and the GPU that runs it",
) -> Figure:
    """A launch of `blocks` x `threads`, one block of it opened, and the GPU below which its memories stand.

    Args:
        blocks: of the grid.
        threads: of a block, a multiple of 32.
        sms: drawn of the GPU.
        sizes: of an SM's registers, of its shared memory, of the global memory.
        title: above the picture.

    Raises:
        ConfigError: a number below 1, or threads that are no whole warps.
    """
    if threads < WARP or threads % WARP:
        raise ConfigError(f"a block of {threads} threads is not made of warps", fix="a multiple of 32")
    runs = dealt(blocks, sms)
    with styled():
        figure = new_figure(10.4, 4.4, title)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
        _launch(left, blocks, threads)
        _gpu(right, runs, sizes)
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


def _gpu(axes: Axes, runs: Sequence[Sequence[int]], sizes: Sequence[str]) -> None:
    axes.set_title("What runs it")
    width, gap = 40.0, 1.2
    each = (width - gap * (len(runs) + 1)) / len(runs)
    registers, shared, whole = sizes
    box(axes, (0, 8.6), (width, 19.9), PAPER, edge=INK)
    _text(axes, 0.6, 27.6, "GPU: many SMs (an H100 has 132)", bold=True)
    for sm, mine in enumerate(runs):
        x = gap + sm * (each + gap)
        box(axes, (x, 9.4), (each, 17.2), "white", edge=INK)
        _text(axes, x + each / 2, 25.6, f"SM {sm} runs", centre=True, bold=True)
        _text(axes, x + each / 2, 24.0, "block " + ", ".join(map(str, mine)) if mine else "nothing", centre=True)
        box(axes, (x + 0.8, 17.0), (each - 1.6, 5.6), REGISTERS, f"registers, {registers}\none thread sees its own",
            edge=INK, fontsize=7.5)  # fmt: skip
        box(axes, (x + 0.8, 10.2), (each - 1.6, 5.6), SHARED, f"shared memory, {shared}\nthe threads of one block\n"
            "see their part of it", edge=INK, fontsize=7.5)  # fmt: skip
        axes.annotate("", (x + each / 2, 5.9), (x + each / 2, 9.4), arrowprops={"arrowstyle": "<->", "color": INK})
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
