"""A course whose author made a mistake: its reference raises."""

from __future__ import annotations

from labkit.exercises import Case, Exercise, Lab

LAB = Lab("00_broken", [Exercise("fails", reference=lambda: 1 / 0, cases=[Case("anything", {})])])
