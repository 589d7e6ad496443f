"""The memory of a step: bytes alive over time, stacked by owner, with the peak.

Owners have the same colour and order in every picture, permanent state below and temporary tensors above, so that
several runs can be compared on one scale. A triangle marks the peak; what ran then, if the tracker was told
(`Tracker.phase`, `Tracker.tell`), stands below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.bars import FAR, stacked
from minimegatron.viz.picture import (
    BYTES,
    INK,
    PALETTE,
    SECONDS,
    Picture,
    bytes_text,
    new_figure,
    scaled,
    styled,
)

if TYPE_CHECKING:
    from minimegatron.memory import Sample

ACROSS = 3  # panels
# From the bottom of a stack to its top.
OWNERS = {
    "parameters": PALETTE[7],
    "main parameters": PALETTE[6],
    "moments": PALETTE[5],
    "gradients": PALETTE[3],
    "communication": PALETTE[4],
    "activations": PALETTE[0],
    "workspace": PALETTE[2],
}


def curves(runs: Mapping[str, Sequence[Sample]], *, title: str = "") -> Figure:
    """One panel a run, all on one scale, at most three side by side: what is written must be read in a notebook.

    Args:
        runs: {name: samples of a `memory.Tracker`, in order}.
        title: above the picture.

    Raises:
        ConfigError: a run without samples.
    """
    stack = _Stack.of(runs, None)
    with styled():
        across, down = min(ACROSS, len(runs)), -(-len(runs) // ACROSS)
        figure = new_figure(1.4 + 2.9 * across, 0.6 + 2.7 * down, title)
        panels = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
        for axes in panels[len(runs) :]:
            axes.set_axis_off()
        for axes, (name, samples) in zip(panels, runs.items(), strict=False):
            top = stack.draw(axes, range(len(samples)), samples)
            axes.set_title(f"{name}: {bytes_text(top.total)}")
            axes.set_xlabel("moments of a step" + (f"\nfullest: {top.where}" if top.where else ""))
            axes.set_xticks([])
        stack.legend(figure, panels[: len(runs) : across])
    return figure


def over_time(ranks: Mapping[str, Sequence[Sample]], *, limit: float, title: str = "") -> Figure:
    """One panel a rank below each other, all on one scale and one clock.

    Args:
        ranks: {name: samples in order}; a sample lasts until the next.
        limit: bytes that there are, drawn as a line where it is not far away.
        title: above the picture.

    Raises:
        ConfigError: a rank without samples.
    """
    near = limit <= FAR * max((s.total for samples in ranks.values() for s in samples), default=0)
    stack = _Stack.of(ranks, limit if near else None)
    end = max(samples[-1].seconds for samples in ranks.values())
    divisor, unit = scaled(end * 1e6, SECONDS, 1000)
    with styled():
        figure = new_figure(8.6, 1.2 + 1.3 * len(ranks), title)
        panels = figure.subplots(len(ranks), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axes, (name, samples) in zip(panels, ranks.items(), strict=True):
            top = stack.draw(axes, [sample.seconds * 1e6 / divisor for sample in samples], samples)
            where = f" in {top.where}" if top.where else ""
            axes.set_title(f"{name}: {bytes_text(top.total)}{where}", fontsize=9, loc="left")
        panels[-1].set_xlim(0, end * 1e6 / divisor)
        panels[-1].set_xlabel(f"time in {unit}; limit: {bytes_text(limit)}" + ", beyond the axis" * (not near))
        stack.legend(figure, panels)
    return figure


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Shared by all panels of a picture: the unit, the owners from the bottom to the top, the height."""

    divisor: float
    unit: str
    owners: list[str]
    height: float
    limit: float | None

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Sample]], limit: float | None) -> _Stack:
        if not runs or any(not samples for samples in runs.values()):
            raise ConfigError("memory of nothing", fix="with memory.Tracker(...) as t: one step; then pass t.samples")
        most = max(limit or 0.0, *(max(s.total for s in samples) for samples in runs.values()))
        divisor, unit = scaled(most, BYTES, 1024)
        present = {owner for samples in runs.values() for sample in samples for owner in sample.owners}
        owners = [owner for owner in OWNERS if owner in present] + sorted(present - OWNERS.keys())
        return cls(divisor, unit, owners, most / divisor * 1.1, limit)

    def draw(self, axes: Axes, at: Sequence[float], samples: Sequence[Sample]) -> Sample:
        """One panel, with a triangle at its fullest sample, which is returned."""
        stacks = [[sample.owners.get(owner, 0) / self.divisor for sample in samples] for owner in self.owners]
        axes.stackplot(
            at, stacks, labels=self.owners, colors=[OWNERS.get(o, "#ffffff") for o in self.owners],
            edgecolor=INK, linewidth=0.3, step="post",
        )  # fmt: skip
        top = max(range(len(samples)), key=lambda i: samples[i].total)
        axes.plot([at[top]], [samples[top].total / self.divisor], "v", color=INK, markersize=6, linestyle="none")
        if self.limit is not None:
            axes.axhline(self.limit / self.divisor, color=INK, linestyle="--", linewidth=1.2, label="limit")
        return samples[top]

    def legend(self, figure: Figure, panels: Iterable[Axes]) -> None:
        """The colours of the owners, and the unit of these panels."""
        for axes in panels:
            axes.set_ylabel(self.unit)
            axes.set_ylim(0, self.height)
            handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)))


def ranks(peaks: Mapping[str, Mapping[str, float]], *, limit: float, title: str = "") -> Picture:
    """The fullest moments of several ranks beside each other, one bar a rank.

    Args:
        peaks: {rank: {owner: bytes}}.
        limit: bytes that there are.
        title: above the picture.

    Raises:
        ConfigError: no bytes at all, or an owner that is none of `OWNERS`.
    """
    most = max(sum(owners.values()) for owners in peaks.values())
    divisor, unit = scaled(most, BYTES, 1024)
    bars = {rank: {owner: n / divisor for owner, n in owners.items()} for rank, owners in peaks.items()}
    what = f"{unit} at the fullest moment of a step"
    return stacked(bars, looks=OWNERS, limit=limit / divisor, title=title, what=what)
