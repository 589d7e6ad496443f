"""Checks of lab 01: who talks to whom, and what a sum over ranks costs.

| part               | exercises                                            |
|--------------------|------------------------------------------------------|
| `part01_predicted` | bytes_sent, axis_groups, my_samples, answers         |
| `part01_ranks`     | ring_all_reduce, conjugates, overlap, rank_loss      |
"""

from __future__ import annotations

from minimegatron.lab.course.part01_predicted import BYTES, GROUPS, QUESTIONS, SAMPLER
from minimegatron.lab.course.part01_ranks import BUCKETS, LOSS, PAIR, RING
from minimegatron.lab.exercises import Lab

LAB = Lab("01_process_groups", [BYTES, GROUPS, RING, PAIR, SAMPLER, BUCKETS, LOSS, QUESTIONS])
