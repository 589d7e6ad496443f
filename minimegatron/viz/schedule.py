"""A pipeline schedule as a small drawing: a row of bars a rank, below each the activations it keeps alive.

A notebook stores the drawing as SVG and, for readers without pictures, as text. Both are the same on every machine,
to the last byte: what is drawn is a plan, not a measurement. (A measured run goes to `timeline.gantt`, which has the
predicted one above it.) What a colour says, F, B or W, the label of the bar says too; a darker shade is a later chunk.

    text form, one cell per unit of time; `-` goes on with the bar before, `.` is idle

    rank 0   F0 F1 .  .  .  B0 -  B1 -
    rank 1   .  F0 B0 -  F1 B1 -  .  .       a rank's most live activations stand at the end of its row: live 2
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from html import escape

import numpy as np
from matplotlib.colors import to_hex, to_rgb

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.lanes import at_pixels
from minimegatron.viz.picture import FAINT, INK, PALETTE, WORK, text_on

WIDTH, LEFT, RIGHT, BAR, CURVE, GAP = 860, 52, 56, 20, 14, 6  # px
WIDEST_TEXT = 400  # columns; beyond that the text form lists actions without their times


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture that shows itself in a notebook: `svg` where pictures can be shown, else `text`."""

    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg


def draw_schedule(events: Sequence[Event], live: Sequence[Sequence[int]] = (), title: str = "") -> Drawing:
    """Draw what every rank does when.

    Args:
        events: of all ranks, named F, B or W, with `3` or `3.1` (microbatch.chunk) as their note; any unit of time.
        live: `[rank][i]`: activations that the rank holds during its i-th event; empty draws none.
        title: above the picture.

    Raises:
        ConfigError: there are no events, or `live` does not belong to them.
    """
    rows = _rows(events)
    if live and [len(curve) for curve in live] != [len(row) for row in rows]:
        raise ConfigError(
            "the live activations are not of these events",
            where=f"{[len(c) for c in live]} counts for {[len(r) for r in rows]} events",
            fix="give one count per event of each rank",
        )
    return Drawing(_svg(rows, live, title), _text(rows, live, title))


# ------------------------------------------------------------------------------------------------------------


def _rows(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each rank in order, the clock starting at the first of all."""
    if not events:
        raise ConfigError("a schedule without events", fix="pass simulate(schedule).events()")
    origin = min(e.start for e in events)
    rows: list[list[Event]] = [[] for _ in range(1 + max(e.rank for e in events))]
    for e in sorted(events, key=lambda e: (e.start, e.end)):
        rows[e.rank].append(dataclasses.replace(e, start=e.start - origin, end=e.end - origin))
    return rows


def _svg(rows: list[list[Event]], live: Sequence[Sequence[int]], title: str) -> str:
    horizon = max(e.end for row in rows for e in row)
    highest = max((max(curve, default=0) for curve in live), default=0)
    step, top = BAR + (CURVE if live else 0) + GAP, 22 if title else 4
    height = top + step * len(rows) + 20
    scale = (WIDTH - LEFT - RIGHT) / horizon
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" font-family="sans-serif" font-size="10"><title>{escape(title or "schedule")}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="{LEFT}" y="14" font-size="12" fill="{INK}">{escape(title)}</text>')
    for rank, row in enumerate(rows):
        y = top + rank * step
        parts.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end" fill="{INK}">rank {rank}</text>')
        seen = _seen(row, 1 / scale)
        for which, first, size in seen:
            last = row[first + size - 1]
            width = (last.end - row[first].start) * scale
            parts.append(_bar(row[which], LEFT + row[first].start * scale, y, width, size))
        if live:
            parts.append(_curve(row, live[rank], seen, y + BAR, scale, highest))
    parts += _axis(horizon, scale, top + step * len(rows))
    return "\n".join([*parts, "</svg>"])


def _seen(row: list[Event], pixel: float) -> list[tuple[int, int, int]]:
    """What can be told apart: (the event that a bar looks like, the first event behind it, how many there are)."""
    if not row:
        return []
    start, end = (np.array([float(t) for t in times]) for times in zip(*((e.start, e.end) for e in row), strict=True))
    seen = at_pixels(start, end, pixel)
    return list(zip(seen.which.tolist(), seen.first.tolist(), seen.size.tolist(), strict=True))


def _bar(event: Event, x: float, y: float, width: float, size: int) -> str:
    """A bar and its label; one that stands for several events says how many, and has no frame."""
    label = f"{event.name}{event.note}"
    colour = _colour(event)
    microbatch = event.note.partition(".")[0]
    fits = next((t for t in (label, event.note, microbatch) if 5.8 * len(t) <= width - 1), "")
    if size > 1:
        place = f'x="{_px(x)}" y="{y}" width="{_px(max(width, 1))}" height="{BAR}"'
        return f'<rect {place} fill="{colour}"><title>{size} actions</title></rect>'
    box = (
        f'<rect x="{_px(x)}" y="{y}" width="{_px(width)}" height="{BAR}" fill="{colour}" stroke="{INK}" '
        f'stroke-width="0.5"><title>{label}</title></rect>'
    )
    middle = f'x="{_px(x + width / 2)}" y="{y + 14}" text-anchor="middle" fill="{text_on(colour)}"'
    return box + (f"<text {middle}>{fits}</text>" if fits else "")


def _curve(
    row: list[Event], live: Sequence[int], seen: list[tuple[int, int, int]], y: int, scale: float, highest: int
) -> str:
    """The rank's live activations as a filled step curve, and its peak in words."""
    unit, floor = (CURVE - 2) / highest, y + CURVE
    points = [f"M{_px(LEFT + row[0].start * scale)} {floor}"] if row else ["M0 0"]
    for _, first, size in seen:
        event, last, most = row[first], row[first + size - 1], max(live[first : first + size])
        idle, level = (_px(floor - n * unit) for n in (live[first] - (event.name == "F"), most))
        points.append(f"V{idle}H{_px(LEFT + event.start * scale)}V{level}H{_px(LEFT + last.end * scale)}")
    points.append(f"V{floor}Z")
    words = f'<text x="{WIDTH - RIGHT + 6}" y="{y + CURVE - 2}" fill="{INK}">live {max(live, default=0)}</text>'
    return f'<path d="{"".join(points)}" fill="{FAINT}" fill-opacity="0.5"/>' + words


def _axis(horizon: float, scale: float, y: int) -> list[str]:
    """Ticks at about ten round moments, and at the end."""
    every = next(s for s in _round_numbers() if horizon / s <= 12)
    ticks = [i * every for i in range(int(horizon / every) + 1)]
    ticks = [t for t in ticks if (horizon - t) * scale > 24] + [horizon]
    line = f'<path d="M{LEFT} {y}H{_px(LEFT + horizon * scale)}" stroke="{FAINT}"/>'
    return [line] + [
        f'<text x="{_px(LEFT + t * scale)}" y="{y + 13}" text-anchor="middle" fill="{INK}">{_px(t)}</text>'
        for t in ticks
    ]


def _round_numbers() -> Iterator[float]:
    power = 0.01
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _text(rows: list[list[Event]], live: Sequence[Sequence[int]], title: str) -> str:
    """One cell per unit of time, the unit being what divides every start and end."""
    width = 1 + max(len(e.name + e.note) for row in rows for e in row)
    timed = max(map(len, rows)) * width <= WIDEST_TEXT  # an event takes a cell at least
    unit, cells = _cells(rows) if timed else (Fraction(1), WIDEST_TEXT + 1)
    lines = [title] if title else []
    for rank, row in enumerate(rows):
        if cells * width <= WIDEST_TEXT:
            line = ["."] * cells
            for e in row:
                first, last = (int(Fraction(t).limit_denominator(720) / unit) for t in (e.start, e.end))
                line[first:last] = [e.name + e.note] + ["-"] * (last - first - 1)
            words = "".join(f"{cell:<{width}}" for cell in line)
        else:
            words = " ".join(e.name + e.note for e in row)
        tail = f"  live {max(live[rank], default=0)}" if live else ""
        lines.append(f"rank {rank:<3} {words.rstrip() if not tail else words}{tail}")
    return "\n".join(lines)


def _cells(rows: list[list[Event]]) -> tuple[Fraction, int]:
    """The unit of time that divides every start and end, and how many of it there are."""
    moments = [Fraction(t).limit_denominator(720) for row in rows for e in row for t in (e.start, e.end)]
    denominator = math.lcm(*(t.denominator for t in moments))
    unit = Fraction(math.gcd(*(int(t * denominator) for t in moments)) or 1, denominator)
    return unit, int(max(moments) / unit)


def _colour(event: Event) -> str:
    """By kind; a later chunk is mixed with ink."""
    chunk = int(event.note.partition(".")[2] or 0)
    share = min(0.15 * chunk, 0.6)
    plain, ink = to_rgb(WORK.get(event.name, PALETTE[6])), to_rgb(INK)
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(plain, ink, strict=True))
    return to_hex((red, green, blue))


def _px(x: float) -> str:
    return f"{float(x):.2f}".rstrip("0").rstrip(".")
