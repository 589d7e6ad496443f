"""Stored pictures: fewer bytes, and the same to the eye."""

from __future__ import annotations

import base64
import io

import nbformat
import numpy as np
from PIL import Image

from course.figures.process_groups import sheet
from labkit.build import smaller, with_palette


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=np.int16)


def test_a_drawing_keeps_its_look_in_half_the_bytes() -> None:
    png = sheet(["all_reduce"], 4)._repr_png_()
    small = with_palette(png)
    assert len(small) < 0.5 * len(png)
    difference = np.abs(pixels(small) - pixels(png)).max(-1)
    assert difference.mean() < 1 and (difference > 32).mean() < 1e-3, "flat colours stay, edges hardly change"


def test_only_pictures_that_shrink_are_exchanged() -> None:
    tiny = io.BytesIO()
    Image.new("1", (1, 1)).save(tiny, "PNG")
    png = sheet(["broadcast"], 2)._repr_png_()
    outputs = [
        nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(data).decode(), "text/plain": "x"})
        for data in (tiny.getvalue(), png)
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=outputs)])
    smaller(notebook)
    first, second = (base64.b64decode(o.data["image/png"]) for o in notebook.cells[0].outputs)
    assert first == tiny.getvalue() and second == with_palette(png)
