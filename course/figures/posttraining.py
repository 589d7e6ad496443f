"""Drawings of lab 11: which tokens count, what a token of each row weighs, curves, the loop of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    FAINT,
    INK,
    PALETTE,
    PAPER,
    Picture,
    arrow,
    box,
    legend,
    new_figure,
    panels,
    sample,
    styled,
)

COUNTS = PALETTE[1]

# ------------------------------------------------------------------------------------------------ which tokens count
# A box is a token, as wide as its text; one that counts as a label is green and bold.


def tokens_that_count(texts: Sequence[str], counts: Sequence[bool], *, begins: str) -> Picture:
    """The tokens of a conversation, a line each turn, those that the loss counts marked.

    Args:
        texts: of the tokens.
        counts: whether each counts.
        begins: the token that begins a turn.

    Raises:
        ConfigError: nothing to draw, or not a mark for each token.
    """
    if not texts or len(texts) != len(counts):
        raise ConfigError(f"{len(texts)} tokens and {len(counts)} marks", fix="a mark for each token")
    lines: list[list[tuple[str, bool]]] = []
    for text, count in zip(texts, counts, strict=True):
        if text == begins or not lines:
            lines.append([])
        lines[-1].append((text, count))
    widest = max(sum(_width(text) for text, _ in line) for line in lines)
    with styled():
        figure = new_figure(0.6 + 0.095 * widest, 0.7 + 0.38 * len(lines))
        axes = figure.subplots()
        for y, line in enumerate(lines):
            x = 0.0
            for text, count in line:
                look = (COUNTS, INK) if count else (PAPER, FAINT)
                box(axes, (x, y + 0.1), (_width(text) - 0.3, 0.8), look[0], text, edge=look[1], fontsize=8, bold=count)
                x += _width(text)
        axes.set(xlim=(-0.3, widest), ylim=(len(lines), 0))
        axes.set_axis_off()
        legend(figure, [sample("counts as a label", COUNTS), sample("does not", PAPER, edgecolor=FAINT)])
    return figure


def _width(text: str) -> float:
    return 2.0 + len(text)


# ------------------------------------------------------------------------------------------------- a number of each row


def bars_of_rows(ways: Mapping[str, Sequence[float]], names: Sequence[str], *, what: str, rows: str) -> Picture:
    """For each way a panel with a bar for each row, all on one scale.

    Args:
        ways: {way: a number of each row}.
        names: of the rows.
        what: label of the numbers.
        rows: label of the names.

    Raises:
        ConfigError: nothing to draw, or not a number for each row.
    """
    if not ways or any(len(values) != len(names) for values in ways.values()):
        raise ConfigError(f"numbers of {len(names)} rows are needed", fix="one for each row, in every way")
    with styled():
        figure = new_figure(2.2 * len(ways), 2.4)
        for i, (axes, values) in enumerate(panels(figure, ways, sharey=True)):
            axes.bar(range(len(names)), values, 0.7, color=COUNTS, edgecolor=INK, linewidth=0.6)
            axes.set_xticks(range(len(names)), names, fontsize=7.5)
            axes.set(xlabel=rows, ylabel="" if i else what)
            axes.grid(axis="x", visible=False)
    return figure


# ------------------------------------------------------------------------------------------------------------- curves
# A panel for each quantity, each with a scale of its own; the lines of a panel differ by dashes and colour.


def curves(
    shown: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    xs: Sequence[float] | None = None,
    xlabel: str = "step",
    ylabel: str = "",
    log: bool = False,
    title: str = "",
) -> Picture:
    """Some panels side by side, each with one or several lines over the same places.

    Args:
        shown: {title of a panel: {name of a line: its values}}; the name of a line that stands alone may be "".
        xs: the places; default 0, 1, 2, ...
        xlabel: what they are.
        ylabel: what the values are, where the titles do not say it.
        log: the values on a logarithmic scale.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a line that has not one value for each place.
    """
    lines = [line for panel in shown.values() for line in panel.values()]
    if not lines or (xs is not None and any(len(line) != len(xs) for line in lines)):
        raise ConfigError("no line to draw, or one of another length than its places", fix="a value for each place")
    with styled():
        figure = new_figure(max(4.6, 2.7 * len(shown)), 2.6, title)
        for axes, panel in panels(figure, shown):
            for (name, values), style in zip(panel.items(), ("-", "--", ":", "-."), strict=False):
                axes.plot(range(len(values)) if xs is None else xs, values, style, label=name, linewidth=1.6)
            axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
            if len(panel) > 1:
                columns = len(panel) if sum(map(len, panel)) < 32 else 1
                axes.legend(  # below, for a line may cross any place inside
                    loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=columns, fontsize=7.5, frameon=False
                )
    return figure


# --------------------------------------------------------------------------------------------------------- the loop
# Who computes what in a step that learns from rewards; what the engine does has a colour.

LOOP = ("new weights", "engine: answers", "verifier: rewards", "advantages", "log-probabilities", "loss and step")


def loop() -> Picture:
    """The stations of a step from rewards, in their order, clockwise from the upper left."""
    with styled():
        figure = new_figure(6.6, 1.6)
        axes = figure.subplots()
        corners = [(0.0, 0.0), (2.6, 0.0), (5.2, 0.0), (5.2, 1.1), (2.6, 1.1), (0.0, 1.1)]
        for i, (name, (x, y)) in enumerate(zip(LOOP, corners, strict=True)):
            box(axes, (x, y), (2.2, 0.7), PALETTE[0] if i == 1 else PAPER, name, edge=INK, fontsize=8)
            across, down = corners[(i + 1) % len(corners)]
            if down == y:
                arrow(axes, (x + 2.2 * (across > x), y + 0.35), (across + 2.2 * (across < x), y + 0.35))
            else:
                arrow(axes, (x + 1.1, y + 0.7 * (down > y)), (x + 1.1, down + 0.7 * (down < y)))
        axes.set(xlim=(-0.1, 7.5), ylim=(1.9, -0.1))
        axes.set_axis_off()
    return figure
