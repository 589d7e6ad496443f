"""Fields that say in which dtype the optimizer keeps its numbers, and on which device.

`OptimizerConfig` (config/run.py) inherits them. They have the names of Megatron-LM's flags.

| bytes per parameter of a bf16 model     | weight | main    | gradient | moments | together |
|-----------------------------------------|--------|---------|----------|---------|----------|
| AdamW as it is                          | 2      | 4       | 4        | 4 + 4   | 18       |
| `use_precision_aware_optimizer`         | 2      | 2       | 4        | 4 + 4   | 16       |
| `..., exp_avg..._dtype bf16` (both)     | 2      | 2       | 4        | 2 + 2   | 12       |
| `..., main_grads_dtype bf16`            | 2      | 2       | 2        | 2 + 2   | 10       |
| `..., fp8` moments in place of bf16     | 2      | 2       | 2        | 1 + 1   | 8        |
| `optimizer_cpu_offload`, on the GPU     | 2      | 0       | 4        | 0       | 6        |

Megatron asks for the distributed optimizer with the first; here AdamW, which is element by element, goes with every
layout. It asks for the first with the last, and then keeps fp32 whatever the dtypes say; here that is refused.

Megatron-LM: `OptimizerConfig` in `megatron/core/optimizer/optimizer_config.py`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from minimegatron.config.fields import RUN, Config, free, opt
from minimegatron.errors import require

if TYPE_CHECKING:
    import torch

DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
KEPT = free("where the optimizer's numbers are kept, in dtypes that are compared")


@dataclasses.dataclass(frozen=True)
class StateFields(Config):
    """Dtypes of the optimizer's numbers, and offload."""

    use_precision_aware_optimizer: bool = opt(
        KEPT, False, "main parameters, gradients and moments of AdamW in the dtypes that follow"
    )
    main_params_dtype: str = opt(RUN, "fp32", "of main parameters; fp16 has a scale for each tensor", ("fp32", "fp16"))
    main_grads_dtype: str = opt(RUN, "fp32", "in which gradients are added up and travel", ("fp32", "bf16"))
    exp_avg_dtype: str = opt(
        RUN, "fp32", "of the first moment; fp16 and fp8 have scales", ("fp32", "fp16", "bf16", "fp8")
    )
    exp_avg_sq_dtype: str = opt(RUN, "fp32", "of the second moment, likewise", ("fp32", "fp16", "bf16", "fp8"))
    store_param_remainders: bool = opt(
        KEPT,
        True,
        "with use_precision_aware_optimizer: of an fp32 main parameter keep the 16 bits that a bf16 weight lacks",
    )
    optimizer_cpu_offload: bool = opt(KEPT, False, "main parameters and moments in the host's memory, updated there")
    optimizer_offload_fraction: float = opt(KEPT, 1.0, "the share of elements that is offloaded", least=0.0)
    overlap_cpu_optimizer_d2h_h2d: bool = opt(KEPT, False, "gradients and weights are copied while the host computes")
    use_torch_optimizer_for_cpu_offload: bool = opt(
        KEPT, False, "with offload: torch's optimizer on the GPU too, no kernel"
    )
    pin_cpu_grads: bool = opt(KEPT, True, "offloaded gradients in pinned memory")
    pin_cpu_params: bool = opt(KEPT, True, "offloaded parameters in pinned memory")

    @property
    def fp32_copies(self) -> bool:
        """A 16-bit weight has an fp32 copy beside it, on its device."""
        return not (self.use_precision_aware_optimizer or self.optimizer_cpu_offload)

    @property
    def grad_dtype(self) -> torch.dtype:
        """torch's dtype for `main_grads_dtype`."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.main_grads_dtype]

    def _check_states(self, optimizer: str) -> None:
        low = [f"{name}={value!r}" for name in DTYPES if (value := getattr(self, name)) != "fp32"]
        aware, offload = self.use_precision_aware_optimizer, self.optimizer_cpu_offload
        named = ", ".join(low)
        require(aware or not low, f"{named} without use_precision_aware_optimizer", "give it, or drop them")
        require(
            not aware or optimizer == "adam",
            f"use_precision_aware_optimizer with optimizer={optimizer!r}: the dtypes are those of AdamW's moments",
            "--optimizer adam, or drop it",
        )
        require(
            not offload or not low,
            f"{named} with optimizer_cpu_offload, which keeps fp32 on both sides",
            "drop the dtypes, or --optimizer-cpu-offload",
        )
        require(
            not offload or optimizer in ("adam", "sgd"),
            f"optimizer_cpu_offload with optimizer={optimizer!r}: Muon's products of matrices are for a GPU",
            "--optimizer adam, or no offload",
        )
        fraction = self.optimizer_offload_fraction
        require(fraction <= 1.0, f"optimizer_offload_fraction is {fraction}", "choose it in [0, 1]")
