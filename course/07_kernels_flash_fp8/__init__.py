"""Checks of lab 07: the roofline, kernels in CUDA C++ up a ladder, flash attention by bytes, FP8 and its scales.

| part                | exercises                                             |
|---------------------|-------------------------------------------------------|
| `checks/predict`    | at_best                                               |
| `checks/add`        | add                                                   |
| `checks/norm`       | norm_block, norm_warp, norm_registers, norm_bf16      |
| `checks/backward`   | norm_backward                                         |
| `checks/flash`      | flash_bytes, flash_tiles                              |
| `checks/fp8`        | to_fp8, tile_scales                                   |
| `checks/fp8_linear` | fp8_linear                                            |
| `checks/scales`     | delayed_scaling, shares, answers                      |
"""

from __future__ import annotations

from course import CLOSED
from labkit.exercises import Lab

from .checks import add, backward, flash, norm, predict
from .checks.fp8 import TILE_SCALES, TO_FP8
from .checks.fp8_linear import FP8_LINEAR
from .checks.scales import ANSWERS, DELAYED, SHARES

FP8 = [TO_FP8, TILE_SCALES, DELAYED, FP8_LINEAR, SHARES, ANSWERS]  # the order of the notebook
LAB = Lab(
    "07_kernels_flash_fp8",
    [*predict.EXERCISES, *add.EXERCISES, *norm.EXERCISES, *backward.EXERCISES, *flash.EXERCISES, *FP8],
    without=CLOSED,
)
