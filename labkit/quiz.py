"""`minimegatron quiz`: questions of an interview, until you can answer those of three check-lists.

    minimegatron quiz                        ten questions: those that are due, then new ones
    minimegatron quiz --list                 the check-lists, and how far you are
    minimegatron quiz --level advanced       of one check-list; --lab 03: of one lab
    minimegatron quiz --language zh          in Chinese; by default in the language of your labs

| question                              | answer                                                                   |
|---------------------------------------|--------------------------------------------------------------------------|
| with numbers (`course/quiz`)          | you type a number, or how to compute it: `2 * 640 * 7 / 8`               |
| of a lab's end (`explain`)            | you say it aloud, see the answer, and judge yourself                     |

A question that was answered comes again after 1, 3, 9 and 27 days, one that was not at the next call. What you can is
kept in `my-labs/.work/quiz.json`, written after each answer.
"""

from __future__ import annotations

import ast
import datetime
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from labkit.cards import Card, cards, shown
from labkit.marks import write
from labkit.said import language, say, wrapped
from minimegatron.commands import prose
from minimegatron.errors import ConfigError
from minimegatron.flags import Parser

KEPT = Path("my-labs/.work/quiz.json")
DAYS = (1, 3, 9, 27)  # until a question comes again, after so many right answers in a row; the last one for all further
NEAR = 0.02  # of an answer that is no count
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_LARGEST = 1e6  # exponent
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the comma of 128,256


def number_in(text: str) -> float:
    """The value of what somebody typed: a number, or arithmetic with numbers (`1,024 * 2**3`).

    Raises:
        ValueError: it is something else.
    """
    words = text.strip().replace("·", "*").replace("×", "*").replace("^", "**").rstrip("%").replace("_", "")
    try:
        tree = ast.parse(_THOUSANDS.sub("", words), mode="eval").body
        return float(_value(tree))
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"`{text.strip()}` is no number") from error


def _value(tree: ast.AST) -> float:
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            power = _value(right)
            if abs(power) > _LARGEST:
                raise OverflowError
            return float(_value(left)) ** power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise SyntaxError


def is_right(given: float, answer: float) -> bool:
    """Whether a number answers: exactly where things are counted (an `int`), else within `NEAR`."""
    allowed = 1e-9 if isinstance(answer, int) else NEAR
    return abs(given - answer) <= allowed * abs(answer)


@dataclass
class Known:
    """What has been answered: name of a question -> (right answers in a row, the day of the last one)."""

    path: Path
    answers: dict[str, tuple[int, datetime.date]]

    @staticmethod
    def read(path: Path) -> Known:
        """From a file; nothing if there is none.

        Raises:
            ConfigError: it is no such file.
        """
        try:
            kept = json.loads(path.read_text())
            return Known(path, {name: (int(n), datetime.date.fromisoformat(day)) for name, (n, day) in kept.items()})
        except FileNotFoundError:
            return Known(path, {})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", fix="move it away, and begin again") from None

    def put(self, name: str, right: bool, today: datetime.date) -> None:
        """Keep an answer."""
        self.answers[name] = (self.answers.get(name, (0, today))[0] + 1 if right else 0, today)
        kept = {name: [n, day.isoformat()] for name, (n, day) in sorted(self.answers.items())}
        write(self.path, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")

    def knows(self, name: str) -> bool:
        """Whether the last answer was right."""
        return self.answers.get(name, (0, None))[0] > 0

    def due(self, name: str, today: datetime.date) -> int | None:
        """By how many days it is late; None: it is not due, or new."""
        if name not in self.answers:
            return None
        right, day = self.answers[name]
        late = (today - day).days - (DAYS[min(right, len(DAYS)) - 1] if right else 0)
        return late if late >= 0 else None


def chosen(found: Sequence[Card], known: Known, count: int, today: datetime.date) -> list[Card]:
    """The next questions: those that are due, the latest first, then new ones: of each line of a check-list the first,
    of each the second, and so on."""
    lines = Counter[str]()
    turns = dict[str, int]()
    for card in found:
        turns[card.name] = lines[card.can]
        lines[card.can] += 1
    levels = list(dict.fromkeys(card.level for card in found))
    new = [card for card in found if card.name not in known.answers]
    new.sort(key=lambda card: (levels.index(card.level), turns[card.name]))
    late = {card.name: days for card in found if (days := known.due(card.name, today)) is not None}
    due = sorted((card for card in found if card.name in late), key=lambda card: -late[card.name])
    return [*due, *new][:count]


def lists(found: Sequence[Card], known: Known, of: str = prose.ENGLISH) -> str:
    """The check-lists: a line is ticked when all its questions were answered rightly the last time."""
    lines: list[str] = []
    for level in dict.fromkeys(card.level for card in found):
        cans: dict[str, list[bool]] = {}
        for card in found:
            if card.level == level:
                cans.setdefault(card.can, []).append(known.knows(card.name))
        done = sum(all(right) for right in cans.values())
        lines.append("\n" + say("list", of, level=say(level, of), done=done, count=len(cans)))
        for can, right in cans.items():
            lines.append(f"  [{'x' if all(right) else ' '}] {can}  {sum(right)}/{len(right)}")
    return "\n".join(lines).lstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Raises:
        ConfigError: no question fits what was asked for, or what is kept cannot be read or written.
    """
    parser = Parser("minimegatron quiz", description="Questions of an interview; what you can is kept.")
    parser.add_argument("--list", action="store_true", help="the check-lists, and how far you are")
    parser.add_argument("--level", help="of one check-list: basic, intermediate, advanced")
    parser.add_argument("--lab", metavar="NN", help="the questions of a lab")
    parser.add_argument("--count", type=int, default=10, help="how many questions (10)")
    parser.add_argument("--again", action="store_true", help="also those that are not due yet")
    parser.add_argument("--seed", type=int, help="for the same numbers again")
    parser.add_argument("--kept", type=Path, default=KEPT, metavar="FILE", help=f"where answers are kept ({KEPT})")
    parser.add_argument("--language", help="en or zh; default: that of your labs")
    parser.add_argument("--course", default="course", metavar="PACKAGE", help="whose questions (course)")
    options = parser.parse_args(argv)
    of = options.language or language()
    found = cards(options.course, of)
    there = prose.languages(Path(str(sys.modules[options.course].__file__)).parent)
    if options.language not in (None, *there):
        raise ConfigError(f"there are no questions in {of!r}", fix=f"--language {' or '.join(there)}")
    if options.level and options.level not in (levels := list(dict.fromkeys(card.level for card in found))):
        raise ConfigError(f"there is no level {options.level!r}", fix=f"--level {', '.join(levels)}")
    if options.count < 1:
        raise ConfigError(f"--count is {options.count}", fix="one question at least")
    wanted = [card for card in found if options.level in (None, card.level)]
    if options.lab:
        wanted = [card for card in wanted if card.name.startswith(f"lab {options.lab.zfill(2)},")]
    if not wanted:
        raise ConfigError(f"no question of lab {options.lab}", fix="--lab 01 to 12, and the level that has it, or none")
    known, today = Known.read(options.kept), datetime.date.today()
    if options.list:
        print(lists(wanted, known, of))
        return 0
    asked = wanted[: options.count] if options.again else chosen(wanted, known, options.count, today)
    if not asked:
        print(say("not-due", of))
        return 0
    right = 0
    for i, card in enumerate(asked, 1):
        print("\n" + say("turn", of, i=i, count=len(asked), level=say(card.level, of), can=card.can))
        try:
            answered = _ask(card, Random(options.seed), of)
        except EOFError:
            print("\n" + say("until", of, right=right, count=i - 1))
            return 0
        known.put(card.name, answered, today)
        right += answered
    print("\n" + say("end", of, right=right, count=len(asked)))
    return 0


def _ask(card: Card, draw: Random, of: str) -> bool:
    """Ask one question; whether it was answered.

    Raises:
        EOFError: the reader has had enough (Ctrl-D).
    """
    text, answer, how = card.ask(draw)
    print(wrapped(text))
    if answer is None:
        input(say("aloud", of) + " ")
        print(wrapped(how))
        return _yes(say("was-that", of) + " ")
    while True:
        typed = input("> ")
        if not typed.strip():
            right = False
            break
        try:
            right = is_right(number_in(typed), answer)
            break
        except ValueError:
            print(say("no-number", of, typed=typed.strip()))
    print(wrapped(say("yes" if right else "no", of, answer=shown(answer), how=how)))
    return right


def _yes(question: str) -> bool:
    while True:
        typed = input(question).strip().lower()
        if typed in ("y", "yes", "n", "no"):
            return typed in ("y", "yes")
