"""My tests. They are tried with mistakes in architecture.py: each should make one of them fail.

Run them with `pytest` in this folder. `course.capstone02.trying` has a small model in float64 (`model_of`), the logits
that generation computes (`from_states`), and the gradients of a layout beside those of one process (`first_step`), on
ranks that are warm (`ranks`).
"""

from __future__ import annotations

from course.capstone02.trying import first_step, from_states, model_of, ranks  # noqa: F401


def test_the_model_can_be_built():
    model_of()
