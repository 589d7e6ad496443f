"""Record Megatron's schedule tables and the warm-up counts of its ranks."""

from __future__ import annotations

import types
from typing import Any

# ranks, chunks a rank, microbatches, microbatch_group_size_per_vp_stage
CASES: tuple[tuple[int, int, int, int], ...] = (
    (2, 1, 4, 2), (4, 1, 2, 4), (4, 1, 16, 4), (8, 1, 24, 8),
    (2, 2, 4, 2), (2, 2, 5, 3), (2, 3, 7, 5), (2, 4, 8, 8), (2, 2, 9, 7), (2, 2, 2, 2),
    (3, 3, 9, 3), (3, 2, 7, 4), (3, 2, 12, 6),
    (4, 2, 8, 4), (4, 2, 4, 4), (4, 4, 16, 4), (4, 3, 12, 4), (4, 2, 14, 5), (4, 2, 16, 6),
    (8, 2, 16, 8), (8, 4, 32, 8), (8, 2, 24, 16), (8, 3, 20, 12),
)  # fmt: skip


def make() -> dict[str, Any]:
    """Per case: its sizes, (microbatch, chunk) of every slot, and the warm-up slots of each rank."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    cases = []
    for p, v, m, group in CASES:
        warmups = []
        for rank in range(p):
            pp_group = types.SimpleNamespace(size=lambda p=p: p, rank=lambda rank=rank: rank)
            communicator: Any = types.SimpleNamespace(
                pp_group=pp_group, virtual_pipeline_model_parallel_size=v if v > 1 else None
            )
            total, _, warmup, _ = get_pp_rank_microbatches(m, v, group, p2p_communicator=communicator)
            assert total == m * v
            warmups.append(warmup)
        table = [list(slot) for slot in get_schedule_table(m, v, group)]
        cases.append({"p": p, "v": v, "m": m, "group": group, "warmups": warmups, "table": table})
    return {"cases": cases}
