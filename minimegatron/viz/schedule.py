"""A pipeline schedule: a row of bars for each rank, and below it the activations that the rank keeps.

A notebook stores the drawing as SVG and, for readers without pictures, as text. Both are a plan, so they are the same
on every machine, to the last byte. A legend above the bars explains them:

    colour          F, B or W
    digit           the microbatch; `F3` where there is room for both, else the digit alone: the legend has the letters
    shade           the chunk: light is a rank's first layers, dark its last
    pale band       the rank is idle
    grey steps      activations kept; the legend names their scale, the number behind the row is the most at a time
                    (where a rank has several chunks: of chunks, and in brackets what they are in whole activations)

The text form has one cell per unit of time; `-` continues the action before, `.` is idle, `live` is the most
activations at a time:

    rank 0   F0 F1 .  .  .  B0 -  B1 -
    rank 1   .  F0 B0 -  F1 B1 -  .  .
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
from minimegatron.viz.picture import FAINT, INK, PALETTE, REFERENCE, WORK, text_on
from minimegatron.viz.timeline import at_pixels

WIDTH, LEFT, RIGHT, BAR, CURVE, GAP = 920, 52, 62, 26, 22, 9  # px
WIDE_RIGHT = 102  # px, where numbers of chunks stand behind the rows
LETTER, LINE = 6.6, 20  # px: width of a letter in a bar, height of a line of the legend
WIDEST_TEXT = 400  # columns; beyond that the text form lists actions without their times
IDLE = "#ebebe7"
DEEP = {"F": "#9a6a00", "B": "#1f4f86", "W": "#14502c"}  # the last chunk, where there are several


Entry = tuple[list[tuple[str, str]], str]  # of the legend: samples (colour, label), and what they say


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture that shows itself in a notebook: `svg` where pictures can be shown, else `text`."""

    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg


def draw_schedule(
    events: Sequence[Event], live: Sequence[Sequence[int]] = (), title: str = "", *, most: int = 0, note: str = ""
) -> Drawing:
    """Draw what every rank does when.

    Args:
        events: of all ranks, named F, B or W, with `3` or `3.1` (microbatch.chunk) as their note; any unit of time.
        live: `[rank][i]`: activations that the rank holds during its i-th event; empty draws none.
        title: above the picture.
        most: activations at the full height of the curves, so that two pictures can be compared; 0: the highest here.
        note: a sentence at the end of the legend.

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
    return Drawing(_svg(rows, live, title, most, note), _text(rows, live, title))


def shade(light: str, dark: str, share: float) -> str:
    """The colour of a chunk: `share` 0 is light, the first chunk; 1 is dark, the last."""
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(to_rgb(light), to_rgb(dark), strict=True))
    return to_hex((red, green, blue))


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


def _svg(rows: list[list[Event]], live: Sequence[Sequence[int]], title: str, most: int, note: str) -> str:
    horizon = max(e.end for row in rows for e in row)
    highest = max(most, *(max(curve, default=0) for curve in live), 1)
    chunks = 1 + max(_chunk(e) for row in rows for e in row)
    end = WIDTH - (WIDE_RIGHT if live and chunks > 1 else RIGHT)
    scale = (end - LEFT) / horizon
    with_letters = _room_for_letters(rows, scale)
    legend, lines = _legend(rows, highest if live else 0, chunks, with_letters, note, 26 if title else 4)
    step, top = BAR + (CURVE if live else 0) + GAP, (26 if title else 4) + LINE * lines + 8
    height = top + step * len(rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" font-family="sans-serif" font-size="11"><title>{escape(title or "schedule")}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        parts.append(_words(LEFT, 15, title, 'font-size="13" font-weight="bold"'))
    parts += legend
    for rank, row in enumerate(rows):
        y = top + rank * step
        parts.append(_words(LEFT - 6, y + 17, f"rank {rank}", 'text-anchor="end"'))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{_px(horizon * scale)}" height="{BAR}" fill="{IDLE}"/>')
        seen = _seen(row, 1 / scale)
        for which, first, size in seen:
            width = (row[first + size - 1].end - row[first].start) * scale
            place = LEFT + row[first].start * scale, y, width
            parts.append(_bar(row[which], place, size, _colour(row[which], chunks), with_letters))
        if live:
            parts.append(_curve(row, live[rank], seen, y + BAR, scale, highest))
            parts.append(_words(end + 6, y + BAR + CURVE - 4, _peak(live[rank], chunks)))
    parts += _axis(horizon, scale, top + step * len(rows))
    return "\n".join([*parts, "</svg>"])


def _room_for_letters(rows: list[list[Event]], scale: float) -> bool:
    """Whether `F3` fits into every bar; else all have the digit alone."""
    return all((e.end - e.start) * scale >= LETTER * (1 + len(_microbatch(e))) + 3 for row in rows for e in row)


def _seen(row: list[Event], pixel: float) -> list[tuple[int, int, int]]:
    """Bars that can be told apart: (index of the event that the bar looks like, index of its first event, number of
    events)."""
    if not row:
        return []
    start, end = (np.array([float(t) for t in times]) for times in zip(*((e.start, e.end) for e in row), strict=True))
    seen = at_pixels(start, end, pixel)
    return list(zip(seen.which.tolist(), seen.first.tolist(), seen.size.tolist(), strict=True))


def _bar(event: Event, place: tuple[float, int, float], size: int, colour: str, with_letters: bool) -> str:
    """A bar and its label; one that stands for several events says how many, and has no frame."""
    (x, y, width), label = place, f"{event.name}{event.note}"
    if size > 1:
        where = f'x="{_px(x)}" y="{y}" width="{_px(max(width, 1))}" height="{BAR}"'
        return f'<rect {where} fill="{colour}"><title>{size} actions</title></rect>'
    box = (
        f'<rect x="{_px(x)}" y="{y}" width="{_px(width)}" height="{BAR}" fill="{colour}" stroke="{INK}" '
        f'stroke-width="0.6"><title>{label}</title></rect>'
    )
    short = event.name * with_letters + _microbatch(event)
    fits = LETTER * len(short) <= width - 1
    return box + (_words(x + width / 2, y + 17, short, 'text-anchor="middle"', text_on(colour)) if fits else "")


def _curve(
    row: list[Event], live: Sequence[int], seen: list[tuple[int, int, int]], y: int, scale: float, highest: int
) -> str:
    """The rank's live activations as a filled step curve."""
    unit, floor = (CURVE - 4) / highest, y + CURVE
    points = [f"M{_px(LEFT + row[0].start * scale)} {floor}"] if row else ["M0 0"]
    for _, first, size in seen:
        event, last, peak = row[first], row[first + size - 1], max(live[first : first + size])
        idle, level = (_px(floor - n * unit) for n in (live[first] - (event.name == "F"), peak))
        waited = first > 0 and event.start - row[first - 1].end > 1e-9
        points.append(f"V{idle}H{_px(LEFT + event.start * scale)}" * waited)
        points.append(f"V{level}H{_px(LEFT + last.end * scale)}")
    points.append(f"V{floor}Z")
    return f'<path d="{"".join(points)}" fill="{REFERENCE[0]}" stroke="{FAINT}" stroke-width="0.8"/>'


def _peak(live: Sequence[int], chunks: int) -> str:
    """The most activations at a time; for chunks also in activations of all layers of a rank."""
    most = max(live, default=0)
    return f"at most {most}" if chunks == 1 else f"{most} chunk{'s' * (most != 1)} ({_px(most / chunks)})"


def _axis(horizon: float, scale: float, y: int) -> list[str]:
    """Ticks at about ten round moments, and at the end."""
    every = next(s for s in _round_numbers() if horizon / s <= 12)
    ticks = [i * every for i in range(int(horizon / every) + 1)]
    ticks = [t for t in ticks if (horizon - t) * scale > 24] + [horizon]
    line = f'<path d="M{LEFT} {y}H{_px(LEFT + horizon * scale)}" stroke="{FAINT}"/>'
    numbers = [_words(LEFT + t * scale, y + 14, _px(t), 'text-anchor="middle"') for t in ticks]
    return [line, *numbers, _words(LEFT + horizon * scale + 22, y + 14, "steps")]


def _round_numbers() -> Iterator[float]:
    power = 0.01
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


# ------------------------------------------------------------------------------------------------------- legend


def _legend(
    rows: list[list[Event]], highest: int, chunks: int, with_letters: bool, note: str, top: int
) -> tuple[list[str], int]:
    """The parts of the legend and its number of lines: one, or two if it is too long; the note has its own."""
    events = [e for row in rows for e in row]
    kinds = [kind for kind in WORK if any(e.name == kind for e in events)]
    first = _entries_of_work(events, kinds, with_letters)
    second: list[Entry] = []
    if chunks > 1:
        shades = [chunk / (chunks - 1) for chunk in range(chunks)]
        second = [([(shade(WORK[k], DEEP[k], s), "") for k in kinds], f"chunk {c}") for c, s in enumerate(shades)]
    second.append(([(IDLE, "")], "idle"))
    if highest:
        kept = "activations kept" if chunks == 1 else "chunks kept (in brackets: whole activations)"
        second.append(([(REFERENCE[0], "")], f"{kept}; full height: {highest}"))
    one_line = sum(map(_length, first + second)) <= WIDTH - LEFT
    lines = [first + second] if one_line else [first, second]
    lines += [[([], note)]] * bool(note)
    parts = []
    for line, entries in enumerate(lines):
        x, y = float(LEFT), top + LINE * line
        for swatches, text in entries:
            at = x
            for colour, label in swatches:
                parts.append(_sample(at, y, colour, label))
                at += _swatch(label)
            parts.append(_words(at + 5, y + 12, text))
            x += _length((swatches, text))
    return parts, len(lines)


def _entries_of_work(events: list[Event], kinds: list[str], with_letters: bool) -> list[Entry]:
    """Entries for F, B and W, each with the last microbatch as an example."""
    last = max((_microbatch(e) for e in events), key=lambda text: int(text or 0))
    of = {kind: {(e.rank, e.note) for e in events if e.name == kind} for kind in "BW"}
    backward = "its backward"
    if of["W"]:
        backward = "its backward (short: for the input only)" if of["B"] - of["W"] else "its backward for the input"
    meaning = {"F": f"forward of microbatch {last}", "B": backward, "W": "its backward for the weights"}
    if with_letters:
        return [([(WORK[kind], kind + last)], meaning[kind]) for kind in kinds]
    return [([(WORK[kind], last)], f"{kind}: {meaning[kind]}") for kind in kinds]


def _length(entry: Entry) -> float:
    """The width of an entry in its line."""
    swatches, text = entry
    return sum(_swatch(label) for _, label in swatches) + 5 + 5.8 * len(text) + 14


def _swatch(label: str) -> float:
    """The width of a sample of the legend."""
    return 12 + LETTER * len(label)


def _sample(x: float, y: int, colour: str, label: str) -> str:
    width = _swatch(label)
    box = f'<path d="M{_px(x)} {y}h{_px(width)}v16h{_px(-width)}z" fill="{colour}" stroke="{INK}" stroke-width="0.6"/>'
    return box + _words(x + width / 2, y + 12, label, 'text-anchor="middle"', text_on(colour)) * bool(label)


# -------------------------------------------------------------------------------------------------- text, colours


def _text(rows: list[list[Event]], live: Sequence[Sequence[int]], title: str) -> str:
    """The text form: one cell per unit of time."""
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


def _microbatch(event: Event) -> str:
    return event.note.partition(".")[0]


def _chunk(event: Event) -> int:
    return int(event.note.partition(".")[2] or 0)


def _colour(event: Event, chunks: int) -> str:
    """The colour of a kind, from light for chunk 0 to dark for the last chunk."""
    plain = WORK.get(event.name, PALETTE[6])
    return shade(plain, DEEP.get(event.name, INK), _chunk(event) / max(1, chunks - 1))


def _words(x: float, y: float, text: str, how: str = "", colour: str = INK) -> str:
    return f'<text x="{_px(x)}" y="{_px(y)}" {how}{" " * bool(how)}fill="{colour}">{escape(text)}</text>'


def _px(x: float) -> str:
    return f"{float(x):.2f}".rstrip("0").rstrip(".")
