"""From ids to text while they come: whole characters only, and nothing that a stop string may still take back.

The problem in a sentence: a token is bytes, not text; an emoji is three tokens, a stop string begins in the middle of
one, and what a reader has seen cannot be taken back.

    ids --> Detokenizer --> characters that are settled --> StopStrings --> text that is settled

| held back                                          | at most                     | until                     |
|----------------------------------------------------|-----------------------------|---------------------------|
| bytes that may begin a character                   | 3 bytes                     | it is whole, or cannot be |
| the end of the text, where a stop string may begin | its longest beginning there | it is whole, or cannot be |

Text that is not streamed is the same pieces joined, so the two are equal by construction, and equal to the tokenizer's
own decoding of prompt and answer where their bytes are UTF-8.

**A window.** What a token looks like depends on the one before it (a blank at the beginning of a text may be none), and
bytes become other characters once more of them have come. So the tokens of the last text and all after it are decoded
together, and what was given out before is cut off: a token costs the decoding of a few.

**Which stop string** ends a text does not depend on how it was cut into tokens: the one whose end comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MOST_BYTES = 4  # of a character in UTF-8


class Detokenizer:
    """Text of an answer, a token at a time.

    Args:
        decode: ids -> text, special tokens left out.
        prompt: the ids before it; they are not part of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        count = 16
        while count < len(prompt) and not decode(prompt[-count:]):  # special tokens alone: a text begins before them
            count *= 2
        self._window = list(prompt[-count:])
        self._text = decode(self._window)
        self._shown = self._text.rstrip(REPLACEMENT)  # of the window's text
        self._since = len(self._window)  # tokens in the window that are older than the last text
        self._pending = 0  # tokens since then that have changed something

    def push(self, token: int) -> str:
        """The characters that are settled by one more token."""
        self._window.append(token)
        text = self._decode(self._window)
        self._pending += text != self._text
        self._text = text
        settled = text.rstrip(REPLACEMENT)
        whole = settled == text
        if self._pending >= MOST_BYTES:  # more than a character has: these bytes are no text, but for the last
            settled = text[: max(len(settled), len(text) - MOST_BYTES + 1)]
        if len(settled) <= len(self._shown) or not (whole or settled.startswith(self._shown)):
            return ""
        new, self._shown, self._pending = settled[len(self._shown) :], settled, 0
        if whole:
            self._window = self._window[self._since :]
            self._shown = self._text = self._decode(self._window)
            self._since = len(self._window)
        return new

    def flush(self) -> str:
        """What is left at the end: bytes that have become no character."""
        new, self._shown = self._text[len(self._shown) :], self._text
        return new


class StopStrings:
    """Where a text ends that comes in pieces.

    Args:
        stops: the strings, none of them empty.

    Attributes:
        found: the one that has ended the text; None while none has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is settled by a piece; once `found` is set, all of it: neither the stop string nor more."""
        if self.found is not None or not self.stops:
            return "" if self.found is not None else piece
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        longest = min(max(map(len, self.stops)) - 1, len(text))
        keep = next((k for k in range(longest, 0, -1) if any(s.startswith(text[-k:]) for s in self.stops)), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string has ended."""
        held, self._held = self._held, ""
        return held


def token_bytes(token: str, text: str) -> bytes:
    """The bytes of one token.

    Args:
        token: as the vocabulary spells it: letters for bytes (GPT-2), `<0xE2>`, or with `\u2581` for a blank.
        text: as it is decoded alone.
    """
    if token.startswith("\u2581"):
        return token.replace("\u2581", " ").encode()
    if REPLACEMENT not in text:
        return text.encode()
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    if all(letter in BYTES for letter in token):
        return bytes(BYTES[letter] for letter in token)
    return text.encode()


_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2: a byte is its letter where it has one,
_HIDDEN = sorted({*range(256)} - {*_SHOWN})  # else the next letter from 256 on
BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
