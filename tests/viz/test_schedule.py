"""The drawing of a schedule: what it shows, in both forms, and that it is the same every time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.schedule import BAR, LEFT, RIGHT, WIDTH, draw_schedule

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


def test_bars_stand_where_the_events_are() -> None:
    found = bars(draw_schedule(plan(), title="two ranks").svg)
    unit = (WIDTH - LEFT - RIGHT) / 9
    assert [(label, round((x - LEFT) / unit, 2), round(w / unit, 2)) for label, x, _, w, _ in found] == [
        ("F0", 0, 1), ("F1", 1, 1), ("B2", 5, 2), ("B3", 7, 2), ("F4", 1, 1), ("B5", 2, 2),
    ]  # fmt: skip
    assert len({y for label, _, y, _, _ in found}) == 2, "two ranks, two rows"
    assert len({colour for *_, colour in found}) == 2, "F and B"
    assert found[-1][1] + found[-1][3] <= WIDTH - RIGHT + 0.01


def test_the_text_form_has_one_cell_per_unit() -> None:
    assert repr(draw_schedule(plan(), [[1, 2, 2, 1], [1, 1]], "two ranks")).splitlines() == [
        "two ranks",
        "rank 0   F0 F1 .  .  .  B2 -  B3 -    live 2",
        "rank 1   .  F4 B5 -  .  .  .  .  .    live 1",
    ]
    thirds = repr(draw_schedule(plan(1 / 3)))
    assert thirds == repr(draw_schedule(plan())) == repr(draw_schedule(plan(shift=17.5))), "the unit is found"


def test_long_ones_list_their_order_only() -> None:
    events = [Event("F", "compute", 0, i, i + 1, note=str(i)) for i in range(200)]
    assert repr(draw_schedule(events)).startswith("rank 0   F0 F1 F2 F3 ")
    assert len(bars(draw_schedule(events).svg)) == 200


def test_live_activations_are_a_curve_under_the_bars() -> None:
    svg = draw_schedule(plan(), [[1, 2, 2, 1], [1, 1]]).svg
    texts = [t.text for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "live 2" in texts and "live 1" in texts and "rank 1" in texts and "9" in texts
    curves = [p.get("d") for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("d").endswith("Z")]
    assert len(curves) == 2
    tops = [{float(step.split("H")[0]) for step in curve.split("V")[2:-1:2]} for curve in curves]
    rows = sorted({y for _, _, y, _, _ in bars(svg)})
    floors = [y + BAR + 14 for y in rows]
    heights = [{round(floor - top, 2) for top in levels} for floor, levels in zip(floors, tops, strict=True)]
    assert heights == [{6, 12}, {6}], "one unit of height an activation, on every rank the same"
    idle = float(curves[0].split("V")[5].split("H")[0])
    assert round(floors[0] - idle, 2) == 12, "rank 0 keeps both while it waits for B2"


def test_later_chunks_are_darker_and_titles_are_text() -> None:
    plain, later = (bars(draw_schedule(plan(chunk=c)).svg) for c in (".0", ".1"))
    for (_, _, _, _, light), (_, _, _, _, dark) in zip(plain, later, strict=True):
        assert sum(bytes.fromhex(dark[1:])) < sum(bytes.fromhex(light[1:]))
    assert "a &lt; b" in draw_schedule(plan(), title="a < b").svg
    assert draw_schedule(plan())._repr_svg_() == draw_schedule(plan()).svg


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="without events"):
        draw_schedule([])
    with pytest.raises(ConfigError, match=r"\[3\] counts for \[4, 2\] events"):
        draw_schedule(plan(), [[1, 2, 3]])
