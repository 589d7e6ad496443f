"""Checks of lab 07: the roofline, a kernel in CUDA C++ up a ladder, flash attention by bytes, FP8 and its scales.

| part            | exercises                                             |
|-----------------|-------------------------------------------------------|
| `part07_norm`   | norm_bytes, at_best, norm_rows, norm_block, norm_warp |
| `part07_flash`  | flash_bytes, flash_tiles                              |
| `part07_fp8`    | to_fp8, tile_scales, fp8_linear                       |
| `part07_scales` | delayed_scaling, shares, answers                      |
"""

from __future__ import annotations

from minimegatron.lab.course import part07_flash, part07_norm
from minimegatron.lab.course.part07_fp8 import FP8_LINEAR, TILE_SCALES, TO_FP8
from minimegatron.lab.course.part07_scales import ANSWERS, DELAYED, SHARES
from minimegatron.lab.exercises import Lab

FP8 = [TO_FP8, TILE_SCALES, DELAYED, FP8_LINEAR, SHARES, ANSWERS]  # the order of the notebook
LAB = Lab("07_kernels_flash_fp8", [*part07_norm.EXERCISES, *part07_flash.EXERCISES, *FP8])
