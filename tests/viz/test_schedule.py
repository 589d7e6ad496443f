"""The drawing of a schedule: what it shows, in both forms, and that it is the same every time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.schedule import BAR, CURVE, LEFT, RIGHT, WIDTH, draw_schedule

SVG = "{http://www.w3.org/2000/svg}"
PLAN = (("F", 0, 0, 1), ("F", 0, 1, 2), ("B", 0, 5, 7), ("B", 0, 7, 9), ("F", 1, 1, 2), ("B", 1, 2, 4))


def plan(scale: float = 1.0, shift: float = 0.0, chunk: str = "") -> list[Event]:
    return [
        Event(name, "compute", rank, shift + a * scale, shift + b * scale, note=f"{i}{chunk}")
        for i, (name, rank, a, b) in enumerate(PLAN)
    ]


def bars(svg: str) -> list[tuple[str, float, float, float, str]]:
    """(label, x, y, width, colour) of each bar."""
    found = [r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    return [
        (r.find(f"{SVG}title").text, float(r.get("x")), float(r.get("y")), float(r.get("width")), r.get("fill"))
        for r in found
    ]


def texts(svg: str) -> list[str]:
    return [t.text for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_bars_stand_where_the_events_are() -> None:
    found = bars(draw_schedule(plan(), title="two ranks").svg)
    unit = (WIDTH - LEFT - RIGHT) / 9
    assert [(label, round((x - LEFT) / unit, 2), round(w / unit, 2)) for label, x, _, w, _ in found] == [
        ("F0", 0, 1), ("F1", 1, 1), ("B2", 5, 2), ("B3", 7, 2), ("F4", 1, 1), ("B5", 2, 2),
    ]  # fmt: skip
    assert len({y for label, _, y, _, _ in found}) == 2, "two ranks, two rows"
    assert len({colour for *_, colour in found}) == 2, "F and B"
    assert found[-1][1] + found[-1][3] <= WIDTH - RIGHT + 0.01


def test_the_legend_explains_the_digits_the_colours_and_the_shades() -> None:
    said = texts(draw_schedule(plan()).svg)
    assert {"F5", "forward of microbatch 5", "B5", "its backward", "idle"} <= set(said)
    assert "chunk 0" not in said and "activations kept" not in said
    later = texts(draw_schedule(plan(chunk=".1"), [[1, 2, 2, 1], [1, 1]], note="a sentence").svg)
    assert {"chunk 0", "chunk 1", "chunks kept (in brackets: whole activations); full height: 2"} <= set(later)
    assert "a sentence" in later
    assert "activations kept; full height: 8" in texts(draw_schedule(plan(), [[1, 2, 2, 1], [1, 1]], most=8).svg)
    split = [*plan(), Event("W", "compute", 1, 4, 5, note="5")]
    assert {"its backward (short: for the input only)", "W5", "its backward for the weights"} <= set(
        texts(draw_schedule(split).svg)
    )
    all_split = [e for e in split if e.note == "5"]
    assert "its backward for the input" in texts(draw_schedule(all_split).svg)


@pytest.mark.parametrize("chunk", ["", ".1"])
def test_no_two_entries_of_the_legend_lie_on_each_other_or_leave_the_picture(chunk: str) -> None:
    events = [*plan(chunk=chunk), Event("W", "compute", 1, 4, 5, note=f"5{chunk}")]
    svg = ElementTree.fromstring(draw_schedule(events, [[1, 2, 2, 1], [1, 1, 1]], "title").svg)
    first_bar = min(float(r.get("y")) for r in svg.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None)
    words = [(float(t.get("y")), float(t.get("x")), t) for t in svg.iter(f"{SVG}text") if float(t.get("y")) < first_bar]
    starts = sorted((y, x, t.text) for y, x, t in words if t.get("text-anchor") is None and y > 16)
    for (y, x, text), (below, after, _) in zip(starts, starts[1:], strict=False):
        assert below > y or after > x + 5.8 * len(text), text
    assert all(x + 5.8 * len(text) < WIDTH for _, x, text in starts)


def test_bars_have_letter_and_digit_or_all_the_digit_alone() -> None:
    assert {"F0", "B2", "F4"} <= set(texts(draw_schedule(plan()).svg))
    narrow = [Event("FB"[i % 2], "compute", 0, i, i + 1, note=str(i // 2)) for i in range(50)]
    said = texts(draw_schedule(narrow).svg)
    assert {"0", "17"} <= set(said) and not {"F0", "B17"} & set(said)
    assert {"F: forward of microbatch 24", "B: its backward"} <= set(said), "the legend has the letters"


def test_chunks_are_counted_and_in_brackets_what_they_are_in_activations() -> None:
    svg = draw_schedule(plan(chunk=".1"), [[1, 2, 3, 1], [1, 1]]).svg
    assert {"3 chunks (1.5)", "1 chunk (0.5)"} <= set(texts(svg)), texts(svg)
    right = max(x + width for _, x, _, width, _ in bars(svg))
    assert right + 6 + 5.8 * len("11 chunks (5.5)") < WIDTH, "there is room behind the rows"


def test_the_text_form_has_one_cell_per_unit() -> None:
    assert repr(draw_schedule(plan(), [[1, 2, 2, 1], [1, 1]], "two ranks")).splitlines() == [
        "two ranks",
        "rank 0   F0 F1 .  .  .  B2 -  B3 -    live 2",
        "rank 1   .  F4 B5 -  .  .  .  .  .    live 1",
    ]
    thirds = repr(draw_schedule(plan(1 / 3)))
    assert thirds == repr(draw_schedule(plan())) == repr(draw_schedule(plan(shift=17.5))), "the unit is found"


def levels(svg: str) -> list[list[float]]:
    """Of each rank's curve, the height above its floor after every vertical step."""
    found = [p.get("d") for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("d").endswith("Z")]
    floors = [y + BAR + CURVE for y in sorted({y for _, _, y, _, _ in bars(svg)})]
    steps = [[float(step.split("H")[0].rstrip("Z")) for step in curve.split("V")[1:]] for curve in found]
    return [[round(floor - y, 2) for y in row] for floor, row in zip(floors, steps, strict=True)]


def test_live_activations_are_a_curve_under_the_bars() -> None:
    svg = draw_schedule(plan(), [[1, 2, 2, 1], [1, 1]]).svg
    assert {"at most 2", "at most 1", "rank 1", "9"} <= set(texts(svg))
    one = (CURVE - 4) / 2
    assert levels(svg) == [[one, 2 * one, 2 * one, 2 * one, one, 0], [one, one, 0]], (
        "one unit of height an activation on every rank; rank 0 keeps both while it waits for B2"
    )
    assert levels(draw_schedule(plan(), [[1, 2, 2, 1], [1, 1]], most=6).svg)[1] == [3, 3, 0], "as in a picture with 6"


def test_later_chunks_are_darker_and_titles_are_text() -> None:
    plain, later = (bars(draw_schedule(plan(chunk=c)).svg) for c in (".0", ".1"))
    for (_, _, _, _, light), (_, _, _, _, dark) in zip(plain, later, strict=True):
        assert sum(bytes.fromhex(dark[1:])) < sum(bytes.fromhex(light[1:])) - 100
    assert "a &lt; b" in draw_schedule(plan(), title="a < b").svg
    assert draw_schedule(plan())._repr_svg_() == draw_schedule(plan()).svg


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="without events"):
        draw_schedule([])
    with pytest.raises(ConfigError, match=r"\[3\] counts for \[4, 2\] events"):
        draw_schedule(plan(), [[1, 2, 3]])


def test_a_schedule_of_many_actions_has_no_more_bars_than_pixels():
    n = 20_000
    events = [Event("FB"[i % 2], "compute", r, 3 * i, 3 * i + 2, note=str(i)) for r in (0, 1) for i in range(n)]
    drawing = draw_schedule(events, [[i % 5 for i in range(n)]] * 2)
    assert drawing.svg.count("<rect") <= 2 * 2 * WIDTH + 1 and len(drawing.svg) < 1 << 20
    assert "actions</title>" in drawing.svg and "at most 4" in drawing.svg
    assert drawing.text.count("F0") == 2 and drawing.text.count(f"B{n - 1}") == 2, "the text names every action"
