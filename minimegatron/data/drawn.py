"""Pictures that the program draws, with questions about them: count, colour and position.

    drawn(seed, number)  ->  a picture, ("Which colour is the circle?", "green"), ("How many ...?", "two"), ...

A picture is 2 to 4 cells wide and 2 to 4 high (for an encoder of one size, `cells` of each), a cell 8 x 8 pixels on a
dark ground with noise. One cell has a circle, up to three others have squares, each in one of four colours. Each
question is asked once, in any order: a picture costs more than a question. An answer is one word, and looking at the
picture is the only way to it:

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


class Asked(NamedTuple):
    """A question of a kind, and the word that answers it."""

    kind: str
    question: str
    answer: str


class Drawn(NamedTuple):
    """A picture [H, W, 3] of uint8, and a question of each kind."""

    picture: np.ndarray
    asked: list[Asked]


def drawn(seed: int, number: int, cells: int | None = None) -> Drawn:
    """Picture `number` of a seed, with rows and columns of `cells`; a function of these."""
    random = np.random.default_rng([seed, number])
    rows, columns = (int(n) for n in random.integers(2, 5, 2)) if cells is None else (cells, cells)
    things = int(random.integers(1, 5))
    places = random.permutation(rows * columns)[:things]
    picture = random.integers(20, 60, (rows * CELL, columns * CELL, 3), dtype=np.uint8)
    colours = [list(COLOURS)[i] for i in random.integers(0, len(COLOURS), things)]
    for i, (place, colour) in enumerate(zip(places, colours, strict=True)):
        _fill(picture, *divmod(int(place), columns), COLOURS[colour], round=i == 0)
    row, column = divmod(int(places[0]), columns)
    answers = {"count": NUMBERS[things - 1], "colour": colours[0], "row": NUMBERS[row], "column": NUMBERS[column]}
    kinds = [list(QUESTIONS)[i] for i in random.permutation(len(QUESTIONS))]
    return Drawn(picture, [Asked(kind, QUESTIONS[kind], answers[kind]) for kind in kinds])


def _fill(picture: np.ndarray, row: int, column: int, colour: tuple[int, int, int], round: bool) -> None:
    y, x = np.mgrid[0:CELL, 0:CELL] - (CELL - 1) / 2
    inside = x**2 + y**2 <= (CELL / 2) ** 2 if round else np.maximum(abs(x), abs(y)) <= CELL / 2 - 1
    cell = picture[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
    cell[inside] = colour
