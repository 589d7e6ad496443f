"""Placeholders for a reference with more than one right answer.

"zero3_sends_less_from": OneOf(36864.0, 36865)     # either
{"loss": loss, "dz": ANYTHING}                     # in a `Mistake`: the loss is right, dz is arbitrary
"""

from __future__ import annotations

from typing import Any


class OneOf:
    """Any of these values is right; the first is shown as the expected one."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class _Anything:
    def __repr__(self) -> str:
        return "anything"


ANYTHING = _Anything()
