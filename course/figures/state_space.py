"""The drawing of lab 13: what is left, at each token, of what an earlier one wrote into a state; and which pairs of
tokens a chunk multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMPUTE, FAINT, INK, PAPER, Picture, blank, box, legend, new_figure, sample, styled


def left_of(steps: Sequence[int]) -> list[list[Fraction]]:
    """`[i][j]`: what is left at token i of what token j <= i wrote; at token i a state is halved `steps[i]` times."""
    halvings = list(accumulate(steps))
    return [[Fraction(1, 2 ** (now - then)) for then in halvings[: i + 1]] for i, now in enumerate(halvings)]


def weights_map(steps: Sequence[int], size: int) -> Picture:
    """Draw `left_of` as a matrix, a frame around the pairs inside each chunk of `size` tokens.

    Raises:
        ConfigError: no token, a step below 0, or chunks of none.
    """
    if not steps or min(steps) < 0 or size < 1:
        raise ConfigError(f"steps {list(steps)} in chunks of {size}", fix="whole steps from 0 on, chunks of 1 or more")
    s = len(steps)
    with styled():
        figure = new_figure(0.62 * s + 1.6, 0.5 * s + 1.6, "What is left of what token j wrote, at token i")
        axes = figure.subplots()
        for i, row in enumerate(left_of(steps)):
            for j, left in enumerate(row):
                inside = i // size == j // size
                box(axes, (j, i), (1, 1), COMPUTE if inside else PAPER, str(left), edge=FAINT, fontsize=8)
        for start in range(0, s, size):
            length = min(size, s - start)
            axes.add_patch(Rectangle((start, start), length, length, fill=False, edgecolor=INK, linewidth=2.2))
        for j, step in enumerate(steps):
            axes.text(j + 0.5, -0.25, f"j = {j + 1}\ndt {step}", ha="center", va="bottom", fontsize=8)
            axes.text(-0.2, j + 0.5, f"i = {j + 1}", ha="right", va="center", fontsize=8)
        axes.set_xlim(-1.1, s + 0.1)
        axes.set_ylim(s + 0.1, -1.1)
        blank(axes)
        legend(figure, [sample("in one chunk", COMPUTE), sample("through the states between chunks", PAPER)])
    return figure
