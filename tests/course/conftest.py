"""The nursery of the lab's tests, here too."""

from __future__ import annotations

from tests.labkit.conftest import nursery

__all__ = ["nursery"]
