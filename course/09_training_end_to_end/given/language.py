"""A little language whose entropy is known: sentences of English words, each drawn by the word before it.

The problem in a sentence: to learn from a loss how far a model is from the best possible one, somebody must know the
best possible one.

    WHOSE  WHO     DOES    WHICH   WHAT  .        then another line, or the end of the story
    old    sailor  paints  golden  boats .

Each word chooses the next one from a list of its own, in an order of its own, with the chances of Zipf's law: 1, 1/2,
1/3 ... So what there is to learn is a table of pairs, common ones and rare ones; a model with h numbers a word can hold
the more of it the larger h is. Nothing else depends on anything, and the entropy of a token is a sum over the table.
"""

from __future__ import annotations

import functools
import math
import random

WHOSE = (
    "old young tall small quiet proud lazy brave clever happy hungry gentle wild sleepy honest famous silent "
    "tired busy rich poor merry strange polite"
).split()
WHO = (
    "baker sailor farmer queen king child teacher painter miller doctor dog cat horse goose fox owl wolf mouse "
    "bear crow hare lamb ox pony sheep swan robin tailor hunter singer beggar pilot"
).split()
DOES = (
    "finds loses sees follows paints carries likes fears hides washes draws guards sells opens breaks wants "
    "remembers forgets visits watches admires buys calls cleans hears helps holds lifts meets moves needs "
    "praises"
).split()
WHICH = (
    "grey golden silver wooden broken bright dark round narrow warm cold cheap rare long short empty heavy "
    "secret plain white black red green blue"
).split()
WHAT = (
    "rivers castles gardens boats bridges forests candles letters lanterns mirrors kettles ladders baskets "
    "hammers bells books coats doors drums fields flutes hills lamps needles oaks pears rings roads roses "
    "ships spoons stars stones tables towers trains wheels caves chairs clocks coins cups gates gloves hats "
    "keys knives maps"
).split()
WORDS = (WHOSE, WHO, DOES, WHICH, WHAT)
GOES_ON = 0.75  # another sentence follows


@functools.cache
def order(word: str, part: int) -> tuple[str, ...]:
    """The words of a list as `word` likes them, its favourite first."""
    liked = list(WORDS[part])
    random.Random(f"{word}/{part}").shuffle(liked)
    return tuple(liked)


@functools.cache
def chances(n: int) -> tuple[float, ...]:
    """Zipf's law for n words."""
    total = sum(1 / rank for rank in range(1, n + 1))
    return tuple(1 / rank / total for rank in range(1, n + 1))


def story(rng: random.Random) -> str:
    """Some sentences, a line each."""
    lines = []
    while True:
        said: list[str] = ["."]
        for part, words in enumerate(WORDS):
            said += rng.choices(order(said[-1], part), chances(len(words)))
        lines.append(" ".join(said[1:]) + ".")
        if rng.random() >= GOES_ON:
            return "\n".join(lines)


def stories(n: int, seed: int = 1) -> list[str]:
    """So many stories; the same seed gives the same ones."""
    rng = random.Random(seed)
    return [story(rng) for _ in range(n)]


def nats_of_a_story() -> float:
    """The entropy of a story, in nats: what the best possible model needs on average."""
    of_sentence = sum(-sum(p * math.log(p) for p in chances(len(words))) for words in WORDS)
    whether = -(GOES_ON * math.log(GOES_ON) + (1 - GOES_ON) * math.log(1 - GOES_ON))
    return (of_sentence + whether) / (1 - GOES_ON)


def tokens_of_a_story() -> float:
    """Tokens of a story on average where a word, a period and a line's end are one each, and the story's end is one."""
    return (len(WORDS) + 2) / (1 - GOES_ON)


def is_sentence(line: str) -> bool:
    """Whether a line is a sentence of the language: five words, each from the right list, and a period."""
    words = line.removesuffix(".").split(" ")
    return line.endswith(".") and len(words) == len(WORDS) and all(map(tuple.__contains__, map(tuple, WORDS), words))
