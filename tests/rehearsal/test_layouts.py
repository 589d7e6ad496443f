"""Several ranks, each on a simulated GPU of its own, with groups of NCCL: the numbers are those of ranks on CPUs."""

from __future__ import annotations

import pytest

from tests.rehearsal.cases import LAYOUTS
from tests.rehearsal.compare import Jobs, differences, errors, parameters
from tests.rehearsal.record import Record

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return Jobs(LAYOUTS)


@pytest.mark.parametrize("name", parameters(LAYOUTS))
def test_ranks_on_gpus_train_as_ranks_on_cpus(jobs: Jobs, name: str) -> None:
    gpus, cpus = jobs.on_gpus(name), jobs.on_cpus(name)
    assert not errors(gpus), "\n".join(errors(gpus))
    assert not errors(cpus), "\n".join(errors(cpus))
    assert [one["device"] for one in gpus] == [f"cuda:{rank}" for rank in range(LAYOUTS[name].nproc)]
    assert [one["device"] for one in cpus] == ["cpu"] * LAYOUTS[name].nproc
    for gpu, cpu in zip(gpus, cpus, strict=True):
        assert not differences(gpu, cpu, LAYOUTS[name].tolerance)


@pytest.mark.thorough
def test_all_scales_of_delayed_fp8_travel_in_one_message(jobs: Jobs) -> None:
    record = Record.from_json(jobs.on_gpus("tp 2, fp8 delayed")[0]["record"])
    assert record.count("messages", "step", "layers/fp8/scaling") == 1, record.table("messages", "step")
