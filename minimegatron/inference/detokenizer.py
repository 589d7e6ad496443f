"""Ids to text while they arrive: whole characters only, and no text that a stop string may still cut.

The problem in a sentence: a token is bytes and not text, an emoji is three tokens, a stop string may begin within a
token, and text that was sent cannot be taken back.

    ids --> Detokenizer --> whole characters --> StopStrings --> text that is final

| held back                                        | at most                      | until                              |
|--------------------------------------------------|------------------------------|------------------------------------|
| bytes that may begin a character                 | 3 bytes                      | the character is whole, or invalid |
| the end of the text, if a stop string may begin  | the part of the stop string  | it is whole, or excluded           |
| there                                            | that matches                 |                                    |

An answer that is not streamed is the same pieces joined, so both modes give the same text; where prompt and answer are
valid UTF-8 it equals the tokenizer's own decoding of both.

**A window.** The text of a token depends on the token before it (a blank at the beginning of a text may be dropped),
and bytes may become another character with the next token. So each token is decoded together with the few tokens before
it, and the text that these gave already is cut off.

**Several stop strings**: the one whose end comes first in the text counts, however the text was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MOST_BYTES = 4  # of a character in UTF-8


class Detokenizer:
    """Text of an answer, a token at a time.

    Args:
        decode: ids -> text, special tokens left out.
        prompt: the ids before the answer; their text is not returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        count = 16
        while count < len(prompt) and not decode(prompt[-count:]):  # special tokens alone have no text
            count *= 2
        self._window = list(prompt[-count:])
        self._text = decode(self._window)
        self._shown = self._text.rstrip(REPLACEMENT)  # of the window's text
        self._since = len(self._window)  # tokens in the window that are older than the last text
        self._pending = 0  # tokens since then that have changed something

    def push(self, token: int) -> str:
        """Add a token; returns the new whole characters."""
        self._window.append(token)
        text = self._decode(self._window)
        self._pending += text != self._text
        self._text = text
        settled = text.rstrip(REPLACEMENT)
        whole = settled == text
        if self._pending >= MOST_BYTES:  # longer than any character: all but the last bytes are invalid
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
        """The end of the answer: returns what was held back, with invalid bytes replaced by U+FFFD."""
        new, self._shown = self._text[len(self._shown) :], self._text
        return new


class StopStrings:
    """Finds stop strings in a text that comes in pieces.

    Args:
        stops: the stop strings, none of them empty.

    Attributes:
        found: the stop string that ended the text; None until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece; returns the text that is final now: where `found` is set, the text before the stop string."""
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
        """The end of a text without a stop string: returns what was held back."""
        held, self._held = self._held, ""
        return held


def token_bytes(token: str, text: str) -> bytes:
    """The bytes of one token.

    Args:
        token: its spelling in the vocabulary: a letter for each byte (GPT-2), `<0xE2>`, or with `\u2581` for a blank.
        text: the token decoded alone.
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
