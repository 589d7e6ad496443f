"""Checks of lab 02: a layer cut over tp, and what it sends, stores and forgets.

| part               | exercises                                                                |
|--------------------|--------------------------------------------------------------------------|
| `checks/predicted` | bytes_per_layer, activation_bytes, partial_gradients, answers            |
| `checks/linear`    | column_linear, row_linear, column_backward, initial_part                 |
| `checks/heads`     | qkv_part, attention                                                      |
| `checks/tokens`    | embedding, cross_entropy                                                 |
| `checks/sequence`  | sequence_pair                                                            |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.heads import ATTENTION, QKV
from .checks.linear import COLUMN, INITIAL, OVERLAP, ROW
from .checks.predicted import ACTIVATIONS, BYTES, PARTIAL, QUESTIONS
from .checks.sequence import SEQUENCE
from .checks.tokens import EMBEDDING, LOSS

LAB = Lab(
    "02_tensor_parallel",
    [
        BYTES, ACTIVATIONS, COLUMN, ROW, QKV, ATTENTION, EMBEDDING, LOSS, SEQUENCE, PARTIAL, OVERLAP, INITIAL,
        QUESTIONS,
    ], without=CLOSED)  # fmt: skip
