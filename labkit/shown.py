"""Cleans text of strangers for display: in a terminal, a spreadsheet, a page.

Names of files, messages of exceptions and answers come from a submission. An escape sequence in one of them can clear
the instructor's screen or change the title of the terminal, a line break makes two rows of one, and U+202E reverses the
rest of a line. All of it passes through the function `clean`; `named` is for names of learners and files, which must
stay different from each other.

| character                                                 | shown as     |
|-----------------------------------------------------------|--------------|
| line breaks, tabs, spaces of all widths                    | a space      |
| other controls, marks of direction, half surrogates        | `\\x1b`       |
| joiners, which Persian and Hindi names and emoji need      | themselves   |
| an address in memory, another one in each run: `0x7f31…`   | `0x…`        |
| what comes after 1,000 characters                          | `…`          |

Source: Unicode Standard Annex 44, general categories.
"""

from __future__ import annotations

import hashlib
import re

MOST = 1000
_JOINERS = "\u200c\u200d"
_ADDRESS = re.compile(r"\b0x[0-9a-f]{9,16}\b")


def clean(text: str, most: int = MOST) -> str:
    """One line of at most `most` characters, without control characters."""
    return _short(_ADDRESS.sub("0x…", _line(text[: most + 64])), most)


def named(name: str, most: int = MOST) -> str:
    """A name, unchanged if it is clean; else cleaned, with a digest, because two names could look the same."""
    shown = _short(_line(name[: most + 64]), most)
    return name if shown == name else f"{shown}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _line(text: str) -> str:
    return text if text.isprintable() else "".join(map(_visible, text))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _visible(character: str) -> str:
    if character.isprintable() or character in _JOINERS:
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()
