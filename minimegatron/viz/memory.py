"""The memory of a step: bytes alive over time, stacked by owner, with the moment at which most are.

Owners keep their colour and their order, what lasts below and what comes and goes above, so that curves of several
ways to train can be put side by side on one scale. A triangle marks the fullest moment; what ran then, if the tracker
was told (`Tracker.phase`, `Tracker.tell`), stands below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PALETTE, Picture, bytes_text, new_figure, scaled, styled
from minimegatron.viz.stacked import stacked

if TYPE_CHECKING:
    from minimegatron.memory import Sample

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


def curves(runs: Mapping[str, Sequence[Sample]], *, limit: float | None = None, title: str = "") -> Figure:
    """One panel a run, all on one scale.

    Args:
        runs: {name: samples of a `memory.Tracker`, in order}.
        limit: bytes that there are, drawn as a line.
        title: above the picture.

    Raises:
        ConfigError: a run without samples.
    """
    if not runs or any(not samples for samples in runs.values()):
        raise ConfigError("memory of nothing", fix="with memory.Tracker(...) as t: one step; then pass t.samples")
    most = max(limit or 0.0, *(max(s.total for s in samples) for samples in runs.values()))
    divisor, unit = scaled(most, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)
    held = {owner for samples in runs.values() for sample in samples for owner in sample.owners}
    owners = [owner for owner in OWNERS if owner in held] + sorted(held - OWNERS.keys())
    with styled():
        figure = new_figure(1.4 + 2.9 * len(runs), 3.3, title)
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, (name, samples) in zip(panels, runs.items(), strict=True):
            at = list(range(len(samples)))
            stacks = [[sample.owners.get(owner, 0) / divisor for sample in samples] for owner in owners]
            axes.stackplot(
                at, stacks, labels=owners, colors=[OWNERS.get(o, "#ffffff") for o in owners],
                edgecolor=INK, linewidth=0.3, step="post",
            )  # fmt: skip
            top = max(at, key=lambda i: samples[i].total)
            axes.plot([top], [samples[top].total / divisor], "v", color=INK, markersize=6, linestyle="none")
            axes.set_title(f"{name}: {bytes_text(samples[top].total)}")
            where = samples[top].where
            axes.set_xlabel("moments of a step" + (f"\nfullest: {where}" if where else ""))
            axes.set_xticks([])
            if limit is not None:
                axes.axhline(limit / divisor, color=INK, linestyle="--", linewidth=1.2)
        panels[0].set_ylabel(unit)
        panels[0].set_ylim(0, most / divisor * 1.1)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)))
    return figure


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
    divisor, unit = scaled(most, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)
    bars = {rank: {owner: n / divisor for owner, n in owners.items()} for rank, owners in peaks.items()}
    what = f"{unit} at the fullest moment of a step"
    return stacked(bars, looks=OWNERS, limit=limit / divisor, title=title, what=what)
