"""Checks of lab 02: a layer cut over tp, and what it sends, stores and forgets.

| part                | exercises                           |
|---------------------|-------------------------------------|
| `checks/predicted`  | bytes_per_layer, activation_bytes   |
| `checks/linear`     | column_linear, row_linear           |
| `checks/heads`      | qkv_part, attention                 |
| `checks/one_sum`    | parallel_layer                      |
| `checks/tokens`     | embedding, cross_entropy            |
| `checks/sequence`   | sequence_pair                       |
| `checks/replicated` | partial_gradients                   |
| `checks/overlap`    | column_backward                     |
| `checks/initial`    | initial_part                        |
| `checks/questions`  | answers                             |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks.heads import ATTENTION, QKV
from .checks.initial import INITIAL
from .checks.linear import COLUMN, ROW
from .checks.one_sum import ONE_SUM
from .checks.overlap import OVERLAP
from .checks.predicted import ACTIVATIONS, BYTES
from .checks.questions import QUESTIONS
from .checks.replicated import PARTIAL
from .checks.sequence import SEQUENCE
from .checks.tokens import EMBEDDING, LOSS

LAB = Lab(
    "02_tensor_parallel",
    [
        BYTES, ACTIVATIONS, COLUMN, ROW, QKV, ATTENTION, ONE_SUM, EMBEDDING, LOSS, SEQUENCE, PARTIAL, OVERLAP, INITIAL,
        QUESTIONS,
    ], without=CLOSED)  # fmt: skip
