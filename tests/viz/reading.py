"""What a reader of a picture can see: its words, its boxes, and whether two words lie on each other."""

from __future__ import annotations

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text


def words(figure: Figure) -> list[str]:
    """Every text that is drawn, ticks included."""
    return [t.get_text() for t in _texts(figure)]


def boxes(figure: Figure) -> list[Rectangle]:
    """The filled rectangles of all panels."""
    return [p for axes in figure.axes for p in axes.patches if isinstance(p, Rectangle) and p.get_fill()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose extents share more than a hairline, once the picture is laid out."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    extents = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in _texts(figure)]
    return [
        (a, b)
        for (a, x), (b, y) in combinations(extents, 2)
        if min(x.x1, y.x1) - max(x.x0, y.x0) > 1 and min(x.y1, y.y1) - max(x.y0, y.y0) > 1
    ]


def _texts(figure: Figure) -> list[Text]:
    shown = [axes for axes in figure.axes if axes.get_visible()]
    found = [t for axes in shown for t in axes.findobj(Text)] + list(figure.texts)
    found += [t for legend in figure.legends for t in legend.get_texts()]
    return [t for t in found if t.get_text().strip() and t.get_visible()]
