"""Lab 09, one round of byte-pair encoding: which pair is merged, and what becomes of the words."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def merge_round(words: list[list[str]], counts: list[int]) -> tuple[list[str], list[list[str]]]:
    """By a search of every pair that there could be, in each word."""
    pieces = sorted({piece for word in words for piece in word})
    seen = {
        (a, b): sum(n * sum(word[i : i + 2] == [a, b] for i in range(len(word))) for word, n in
                    zip(words, counts, strict=True))
        for a in pieces for b in pieces
    }  # fmt: skip
    if not any(seen.values()):
        return [], words
    most = max(seen.values())
    pair = min(pair for pair, n in seen.items() if n == most)
    return list(pair), [_merged(word, *pair) for word in words]


def _merged(word: list[str], a: str, b: str) -> list[str]:
    if len(word) < 2:
        return word
    if word[:2] == [a, b]:
        return [a + b, *_merged(word[2:], a, b)]
    return [word[0], *_merged(word[1:], a, b)]


def _words(*texts: str) -> list[list[str]]:
    return [list(text) for text in texts]


def _some(draw: Draw) -> dict[str, Any]:
    """Few letters, so that pairs overlap and tie; some words have been merged already."""
    words = []
    for _ in range(draw.integer(2, 6)):
        word = [draw.choice("aab" if draw.random.random() < 0.7 else "abc") for _ in range(draw.integer(1, 7))]
        if len(word) > 3 and draw.random.random() < 0.5:
            word[:2] = [word[0] + word[1]]
        words.append(word)
    return {"words": words, "counts": [draw.integer(1, 4) for _ in words]}


_FIXED: list[dict[str, Any]] = [
    {"words": _words("aaa"), "counts": [1]},
    {"words": _words("aaaa", "ba"), "counts": [1, 3]},
    {"words": _words("aaa", "abab"), "counts": [1, 1]},
    {"words": _words("ba", "ab"), "counts": [2, 2]},
    {"words": _words("a", "b"), "counts": [2, 1]},
    {"words": _words("ab", "cd"), "counts": [1, 5]},
    {"words": [["ab", "a"], ["a", "ba"]], "counts": [1, 2]},
    {"words": _words("abcab", "cab"), "counts": [1, 1]},
    {"words": [["ab", "c"], ["a", "bc"]], "counts": [2, 2]},
    {"words": _words("zz", "ab"), "counts": [2, 1]},
]
MERGE = Exercise(
    "merge_round",
    reference=merge_round,
    outputs=("pair", "words"),
    cases=[
        Case("the example: low, lower, new", {"words": _words("low", "lower", "new"), "counts": [5, 2, 6]}),
        Case("a letter three times", {"words": _words("baaa", "ab"), "counts": [2, 1]}),
        Case("other words", _some, points=2, hidden=True, draws=6, fixed=_FIXED),
    ],
    idea="Which pairs of neighbours has a word, and how often does a word of count 5 count? Then go through each word "
    "from the left: a piece that was just merged is gone.",
    hint="Add counts[i] to each (word[j], word[j + 1]). Take the largest count, of equal ones the smallest pair. Walk "
    "each word: where both pieces are the pair append the joined one and go on by two, else append and go on by one.",
)  # fmt: skip
