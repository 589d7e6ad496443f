"""A flat buffer as a strip: where each parameter lies, where buckets end, and which rank owns which stretch.

The strip is drawn to scale, an element of the buffer is as wide as any other. Its colour is that of the rank which
owns it (`parallel/data/buckets`: an equal part of every bucket, wherever parameters begin and end); hatched is padding.
A parameter that a shard's border cuts has two colours under one name, and its name is bold.

    name          w2          b2      w1
    strip     [aaaaaaabbbb][bb]//[aaaaaaaaaabbbbbb]//
    shards     rank 0 |rank 1     rank 0   | rank 1
    buckets    |--- bucket 0 ---||---- bucket 1 ----|
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import FAINT, INK, PAPER, Picture, hatch, new_figure, rank_colours, styled

if TYPE_CHECKING:
    from minimegatron.parallel.data.buckets import BufferLayout, Span

WIDTH, LETTER, LINE = 9.5, 0.075, 0.16  # inches: of the strip, of a letter, between names that stand side by side


def buffer_strip(layout: BufferLayout, names: Sequence[str] = (), *, title: str = "") -> Picture:
    """The buffer from its first element to its last.

    Args:
        layout: where everything lies.
        names: of the parameters in the order of registration; default their numbers.
        title: above the picture.

    Raises:
        ConfigError: an empty buffer, or not one name for each parameter.
    """
    names = list(names) or [str(i) for i in range(len(layout.params))]
    if not layout.total or len(names) != len(layout.params):
        raise ConfigError(
            f"{len(names)} names for {len(layout.params)} parameters in {layout.total} elements",
            fix="give one name for each parameter of a buffer that has some",
        )
    longest = max(
        (len(name) for name, place in zip(names, layout.params, strict=True) if not _fits(name, place, layout)),
        default=0,
    )  # fmt: skip  of those above the strip
    with styled():
        figure = new_figure(WIDTH + 0.6, 1.9 + LETTER * longest, title)
        axes = figure.subplots()
        _strip(axes, layout)
        _names(axes, layout, names)
        _buckets(axes, layout)
        axes.set_xlim(-0.004 * layout.total, 1.004 * layout.total)
        axes.set_ylim(-1.0, 1.35 + 0.95 * LETTER * longest)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_axis_off()
        looks = [(f"owned by rank {r}", c, hatch(r)) for r, c in enumerate(rank_colours(layout.shards or 0))]
        looks += [("on every rank", PAPER, "")] * (layout.shards is None)
        looks += [("padding", "white", "////")] * bool(gaps(layout))
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.6, label=text) for text, c, h in looks]
        if straddling(layout):
            handles.append(Patch(facecolor="none", edgecolor="none", label="bold: on several ranks"))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), fontsize=8)
    return figure


def gaps(layout: BufferLayout) -> list[tuple[int, int]]:
    """The elements that belong to no parameter, as [start, stop)."""
    places = sorted((span.start, span.stop) for span in layout.params)
    ends = [0, *(stop for _, stop in places)]
    starts = [*(start for start, _ in places), layout.total]
    return [(a, b) for a, b in zip(ends, starts, strict=True) if a < b]


def straddling(layout: BufferLayout) -> set[int]:
    """The parameters of which no rank owns all, by their place in the order of registration."""
    owners: dict[int, int] = {}
    for rank in range(layout.shards or 0):
        for piece in layout.pieces(rank):
            owners[piece.param] = owners.get(piece.param, 0) + 1
    return {param for param, count in owners.items() if count > 1}


def _strip(axes: Axes, layout: BufferLayout) -> None:
    """Pieces in the colours of their owners, frames of the parameters, padding."""
    if layout.shards is None:
        pieces = [(place, PAPER, "") for place in layout.params]
    else:
        palette = rank_colours(layout.shards)
        pieces = [(p.of_buffer, palette[r], hatch(r)) for r in range(layout.shards) for p in layout.pieces(r)]
    for place, colour, pattern in pieces:
        look = {"facecolor": colour, "hatch": pattern, "edgecolor": FAINT, "linewidth": 0.4}
        axes.add_patch(Rectangle((place.start, 0), place.size, 1, **look))  # type: ignore[arg-type]
    for start, stop in gaps(layout):
        look = {"facecolor": "white", "hatch": "////", "edgecolor": FAINT, "linewidth": 0.0}
        axes.add_patch(Rectangle((start, 0), stop - start, 1, **look))  # type: ignore[arg-type]
    for place in layout.params:
        axes.add_patch(Rectangle((place.start, 0), place.size, 1, fill=False, edgecolor=INK, linewidth=0.9))


def _fits(name: str, place: Span, layout: BufferLayout) -> bool:
    """Whether there is room for the name in its box."""
    return place.size * WIDTH / layout.total > LETTER * len(name) + 0.25


def _names(axes: Axes, layout: BufferLayout, names: Sequence[str]) -> None:
    """A name stands in its box where there is room, else above, upright, with a line to its box."""
    per_inch, cut = layout.total / WIDTH, straddling(layout)
    above = []
    for i, place in sorted(enumerate(layout.params), key=lambda item: item[1].start):
        weight = "bold" if i in cut else "normal"
        if _fits(names[i], place, layout):
            patch = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
            middle = (place.start + place.stop) / 2
            axes.text(middle, 0.5, names[i], ha="center", va="center", fontsize=8, weight=weight, bbox=patch)
        else:
            above.append(((place.start + place.stop) / 2, names[i], weight))
    places = _spread([middle for middle, _, _ in above], LINE * per_inch, layout.total)
    for at, (middle, text, weight) in zip(places, above, strict=True):
        axes.plot([middle, middle, at], [1.0, 1.08, 1.26], color=FAINT, linewidth=0.7, linestyle="-")
        axes.text(at, 1.3, text, ha="center", va="bottom", rotation=90, fontsize=8, weight=weight)


def _spread(wanted: Sequence[float], least: float, total: float) -> list[float]:
    """Places in the same order, at least this far apart, near those wanted."""
    places: list[float] = []
    for at in wanted:
        places.append(max(at, places[-1] + least) if places else at)
    limit = total
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - least
    return places


def _buckets(axes: Axes, layout: BufferLayout) -> None:
    """Below the strip: whose shard, and which bucket; a bucket's border goes through everything."""
    per_inch = layout.total / WIDTH
    for number, bucket in enumerate(layout.buckets):
        span = bucket.span
        for edge in (span.start, span.stop):
            axes.plot([edge, edge], [-0.95, 1.0], color=INK, linewidth=2.0, linestyle="-", solid_capstyle="butt")
        for rank in range(layout.shards or 0):
            shard = bucket.shard(rank, layout.shards or 1)
            if rank:
                axes.plot([shard.start] * 2, [-0.35, 1.0], color=INK, linewidth=1.2, linestyle="--")
            room = shard.size / per_inch
            text = next((text for text in (f"rank {rank}", str(rank)) if len(text) * LETTER + 0.06 < room), "")
            axes.text((shard.start + shard.stop) / 2, -0.2, text, ha="center", va="center", fontsize=8)
        for text in (f"bucket {number}: {span.size:,} elements", f"bucket {number}", str(number)):
            if len(text) * LETTER + 0.1 < span.size / per_inch:
                middle = (span.start + span.stop) / 2
                axes.text(middle, -0.68, text, ha="center", va="center", fontsize=8, style="italic")
                break
