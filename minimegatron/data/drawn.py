"""Pictures that the program draws, with questions about them: count, colour and position.

    drawn(seed, number)  ->  a picture, "Which colour is the circle?", "green"

A picture is 2 to 4 cells wide and 2 to 4 high, a cell 8 x 8 pixels on a grey ground with noise. One cell has a circle,
up to three others have squares, each in one of four colours. The answer is one word, and looking at the picture is the
only way to it:

| kind     | question                         | answers             | a guess is right |
|----------|----------------------------------|---------------------|------------------|
| count    | How many things are there?       | one two three four  | 1/4              |
| colour   | Which colour is the circle?      | red green blue yellow | 1/4            |
| position | In which row is the circle?      | one two three four  | 1/3              |
| position | In which column is the circle?   | one two three four  | 1/3              |

(of rows and columns a picture has 2, 3 or 4, and who sees how many there are guesses 1/2, 1/3 or 1/4.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CELL = 8  # pixels
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
NUMBERS = ("one", "two", "three", "four")
QUESTIONS = {
    "count": "How many things are there?",
    "colour": "Which colour is the circle?",
    "row": "In which row is the circle?",
    "column": "In which column is the circle?",
}


class Drawn(NamedTuple):
    """A picture [H, W, 3] of uint8, a question of a kind, and the word that answers it."""

    picture: np.ndarray
    kind: str
    question: str
    answer: str


def drawn(seed: int, number: int) -> Drawn:
    """Picture `number` of a seed; a function of these two."""
    random = np.random.default_rng([seed, number])
    rows, columns = (int(n) for n in random.integers(2, 5, 2))
    things = int(random.integers(1, 5))
    cells = random.permutation(rows * columns)[:things]
    picture = random.integers(100, 140, (rows * CELL, columns * CELL, 3), dtype=np.uint8)
    colours = [list(COLOURS)[i] for i in random.integers(0, len(COLOURS), things)]
    for place, (cell, colour) in enumerate(zip(cells, colours, strict=True)):
        _fill(picture, *divmod(int(cell), columns), COLOURS[colour], round=place == 0)
    kind = list(QUESTIONS)[int(random.integers(len(QUESTIONS)))]
    row, column = divmod(int(cells[0]), columns)
    answers = {"count": NUMBERS[things - 1], "colour": colours[0], "row": NUMBERS[row], "column": NUMBERS[column]}
    return Drawn(picture, kind, QUESTIONS[kind], answers[kind])


def _fill(picture: np.ndarray, row: int, column: int, colour: tuple[int, int, int], round: bool) -> None:
    y, x = np.mgrid[0:CELL, 0:CELL] - (CELL - 1) / 2
    inside = x**2 + y**2 <= (CELL / 2) ** 2 if round else np.maximum(abs(x), abs(y)) <= CELL / 2 - 1
    cell = picture[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
    cell[inside] = colour
