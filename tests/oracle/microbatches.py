"""Record the batch sizes of Megatron's number-of-microbatches calculators."""

from __future__ import annotations

from typing import Any

# rampup_batch_size (start, increment, samples) or None, global_batch_size, micro_batch_size, dp, decrease if needed
CASES: tuple[tuple[list[int] | None, int, int, int, bool], ...] = (
    (None, 32, 2, 2, False),
    (None, 30, 4, 2, True),
    ([8, 8, 96], 32, 2, 2, False),
    ([16, 16, 1000], 256, 4, 4, False),
    ([32, 32, 777], 128, 2, 8, False),
    ([8, 4, 96], 32, 4, 2, True),
    ([4, 4, 100], 16, 1, 4, False),
    ([64, 64, 1_000_000], 1024, 1, 64, False),
)


def make() -> dict[str, Any]:
    """Per case: the arguments and, after so many samples, [samples, global batch, running batch, microbatches]."""
    from megatron.core.num_microbatches_calculator import (
        ConstantNumMicroBatchesCalculator,
        RampupBatchsizeNumMicroBatchesCalculator,
    )

    cases = []
    for rampup, global_batch, micro_batch, dp, decrease in CASES:
        if rampup is None:
            calculator: Any = ConstantNumMicroBatchesCalculator(global_batch, micro_batch, dp, decrease, rank=1)
        else:
            calculator = RampupBatchsizeNumMicroBatchesCalculator(global_batch, micro_batch, dp, decrease, 1, *rampup)
        last = rampup[2] if rampup else 100
        trace = []
        for consumed in sorted({*range(0, last + last // 4, max(1, last // 60)), last - 1, last, last + 1}):
            calculator.update(consumed, consistency_check=False)
            sizes = calculator.get_current_global_batch_size(), calculator.get_current_running_global_batch_size()
            trace.append([consumed, *sizes, calculator.get()])
        arguments = {
            "rampup_batch_size": rampup,
            "global_batch_size": global_batch,
            "micro_batch_size": micro_batch,
            "data_parallel_size": dp,
            "decrease_batch_size_if_needed": decrease,
        }
        cases.append({"arguments": arguments, "trace": trace})
    return {"cases": cases}
