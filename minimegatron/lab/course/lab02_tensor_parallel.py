"""Checks of lab 02: a layer cut over tp, and what it sends, stores and forgets.

| part               | exercises                                                                |
|--------------------|--------------------------------------------------------------------------|
| `part02_predicted` | bytes_per_layer, activation_bytes, partial_gradients, answers            |
| `part02_linear`    | column_linear, row_linear, column_backward, initial_part                 |
| `part02_heads`     | qkv_part, attention                                                      |
| `part02_tokens`    | embedding, cross_entropy, sequence_pair                                  |
"""

from __future__ import annotations

from minimegatron.lab.course.part02_heads import ATTENTION, QKV
from minimegatron.lab.course.part02_linear import COLUMN, INITIAL, OVERLAP, ROW
from minimegatron.lab.course.part02_predicted import ACTIVATIONS, BYTES, PARTIAL, QUESTIONS
from minimegatron.lab.course.part02_tokens import EMBEDDING, LOSS, SEQUENCE
from minimegatron.lab.exercises import Lab

LAB = Lab(
    "02_tensor_parallel",
    [
        BYTES, ACTIVATIONS, COLUMN, ROW, QKV, ATTENTION, EMBEDDING, LOSS, SEQUENCE, PARTIAL, OVERLAP, INITIAL,
        QUESTIONS,
    ],
)  # fmt: skip
