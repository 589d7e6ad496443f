"""Every pipeline schedule gives the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.twin import Case

PP, V, SCHEDULE = "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "pipeline_schedule"
TP, SP = "tensor_model_parallel_size", "sequence_parallel"


def case_of(schedule: str | None, p: int, m: int, layout: dict[str, Any] | None = None, **fields: Any) -> Case:
    model = {"num_layers": 8, **fields.pop("model", {})}
    return Case({PP: p, SCHEDULE: schedule, **(layout or {})}, model, accumulation=m, double=True, **fields)


@pytest.mark.parametrize("m", [2, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_two_stages(assert_same_as_serial, schedule, m):
    assert_same_as_serial(case_of(schedule, 2, m))
