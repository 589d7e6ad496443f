"""Column layer, something elementwise, row layer: what each rank holds on the way there and on the way back.

The forward pass runs from left to right, the backward pass below it from right to left. f and g reach over all ranks,
because they are where ranks may meet: dark where one sends (an all-reduce), white where it does nothing. Each sends in
one direction and does nothing in the other, so the two dark boxes stand at opposite ends.

| held        | drawn                        | meaning                                             |
|-------------|------------------------------|-----------------------------------------------------|
| `whole`     | grey, hatched                | every rank has the same whole tensor                |
| `part`      | the rank's colour            | these features are on this rank alone               |
| `sum`       | the rank's colour, dashed    | as large as the whole; the ranks' must be added     |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMM, INK, PAPER, Picture, blank, box, new_figure, rank_colours, styled

SENDS, NOTHING = "all-reduce", "nothing"
HATCH = "//"  # whole on every rank, as in `regions`


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor between two steps; `{r}` in a text is the rank. `held` and `held_back`: whole, part or sum."""

    forward: str
    backward: str
    held: str
    held_back: str


@dataclasses.dataclass(frozen=True)
class Work:
    """What each rank computes by itself, in each direction."""

    forward: str
    backward: str


@dataclasses.dataclass(frozen=True)
class Meeting:
    """f or g: what it does in each direction, `SENDS` or `NOTHING`."""

    name: str
    forward: str
    backward: str


Step = Tensor | Work | Meeting
PAIR: tuple[Step, ...] = (
    Tensor("x", "dx", "whole", "whole"),
    Meeting("f", NOTHING, SENDS),
    Tensor("x", "part of dx", "whole", "sum"),
    Work("A{r}", "A{r}ᵀ"),
    Tensor("y{r}", "dy{r}", "part", "part"),
    Work("GELU", "GELU'"),
    Tensor("u{r}", "du{r}", "part", "part"),
    Work("B{r}", "B{r}ᵀ"),
    Tensor("part of z", "dz", "sum", "whole"),
    Meeting("g", SENDS, NOTHING),
    Tensor("z", "dz", "whole", "whole"),
)
_WIDTH, _GAP, _LANE = 1.05, 0.42, 1.0


def flow(steps: Sequence[Step] = PAIR, ranks: int = 2) -> Picture:
    """The steps on so many ranks, forward above, backward below.

    Raises:
        ConfigError: nothing to draw, or a tensor that is held in an unknown way.
    """
    if not steps:
        raise ConfigError("a flow without steps", fix="give at least one")
    for step in steps:
        if isinstance(step, Tensor) and (odd := {step.held, step.held_back} - {"whole", "part", "sum"}):
            raise ConfigError(f"{step.forward} is held {min(odd)!r}", fix="whole, part or sum")
    with styled():
        figure = new_figure(0.92 * len(steps) + 0.9, 2 * (0.62 * ranks + 0.55) + 0.4)
        for axes, back in zip(figure.subplots(2, 1), (False, True), strict=True):
            _direction(axes, steps, ranks, back)
        palette = rank_colours(ranks)
        looks = [
            *((f"only on rank {r}", colour, "") for r, colour in enumerate(palette)),
            ("whole on every rank", PAPER, HATCH), ("the ranks talk", COMM, ""),
        ]  # fmt: skip
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.6, label=text) for text, c, h in looks]
        handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=1.2, linestyle="--", label="partial sum"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def _direction(axes: Axes, steps: Sequence[Step], ranks: int, back: bool) -> None:
    palette, step_width = rank_colours(ranks), _WIDTH + _GAP
    for r in range(ranks):
        axes.text(-0.2, r * _LANE + 0.4, f"rank {r}", ha="right", va="center", fontsize=9)
    for i, step in enumerate(steps):
        x, text = i * step_width, step.backward if back else step.forward
        if isinstance(step, Meeting):
            sends = text == SENDS
            size = (_WIDTH, ranks * _LANE - 0.2)
            label = f"{step.name}\n{text.replace('-', '-' + chr(10)) if sends else text}"
            box(axes, (x, 0), size, COMM if sends else "white", label, edge=INK, fontsize=9, bold=sends)
            continue
        for r in range(ranks):
            said = text.format(r="₀₁₂₃₄₅₆₇₈₉"[r])
            if isinstance(step, Work):
                axes.text(x + _WIDTH / 2, r * _LANE + 0.4, f"× {said}" if said[0] in "AB" else said,
                          ha="center", va="center", fontsize=10, style="italic")  # fmt: skip
                continue
            held = step.held_back if back else step.held
            colour, pattern = (PAPER, HATCH) if held == "whole" else (palette[r], "")
            box(axes, (x, r * _LANE + 0.08), (_WIDTH, 0.64), colour, said, pattern=pattern, edge=INK, fontsize=8.5,
                dashed=held == "sum")  # fmt: skip
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    for i in range(len(steps) - 1):
        left, right = i * step_width + _WIDTH + 0.04, (i + 1) * step_width - 0.04
        for r in range(ranks):
            start, end = (right, left) if back else (left, right)
            axes.annotate("", xytext=(start, r * _LANE + 0.4), xy=(end, r * _LANE + 0.4), arrowprops=arrow)
    axes.set_title("backward, from right to left" if back else "forward, from left to right")
    axes.set_xlim(-1.1, len(steps) * step_width - _GAP + 0.05)
    axes.set_ylim(ranks * _LANE - 0.1, -0.1)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)
