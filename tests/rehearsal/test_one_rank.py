"""One rank on a simulated GPU: every path of the trainer, CUDA graphs and generation give the CPU's numbers.

All cases of an ordinary run share a process. What a case needs that CUDA forbids is its error, with file and line.
"""

from __future__ import annotations

import pytest

from tests.rehearsal.cases import ONE_RANK
from tests.rehearsal.compare import Jobs, differences, errors, parameters
from tests.rehearsal.record import Record

pytestmark = pytest.mark.timeout(1800)
TRAINED = {name: case for name, case in ONE_RANK.items() if isinstance(case.line, str)}
GENERATED = {name: case for name, case in ONE_RANK.items() if isinstance(case.line, dict)}


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return Jobs(ONE_RANK)


@pytest.mark.parametrize("name", parameters(TRAINED))
def test_a_step_on_a_gpu_is_that_of_a_cpu(jobs: Jobs, name: str) -> None:
    found = jobs.on_gpus(name)
    assert not errors(found), "\n".join(errors(found))
    assert found[0]["device"] == "cuda:0"
    assert not differences(found[0], found[0]["cpu"], ONE_RANK[name].tolerance)
    for mine, theirs in zip(found[0]["zeros"], found[0]["cpu"]["zeros"], strict=True):
        assert mine == theirs or mine == pytest.approx(theirs, rel=0.02)  # in bf16 a rounding makes a zero


@pytest.mark.parametrize("name", parameters({name: case for name, case in TRAINED.items() if "graph" in name}))
def test_a_recorded_step_is_played(jobs: Jobs, name: str) -> None:
    record = Record.from_json(jobs.on_gpus(name)[0]["record"])
    assert record.count("launches", "passes", "graph replay") == 1
    # besides the graph: batches into their places, numbers out of theirs
    assert record.count("launches", "passes") <= 30, record.table("launches", "passes")


OFFLOADED = {name: case for name, case in TRAINED.items() if "offload" in name}


@pytest.mark.parametrize("name", parameters(OFFLOADED))
def test_the_host_waits_for_offloaded_gradients_once_a_step(jobs: Jobs, name: str) -> None:
    """Copies from and to pinned memory are no waits; from memory that is not pinned every tensor is one."""
    record = Record.from_json(jobs.on_gpus(name)[0]["record"])
    assert record.count("waits", containing="event.synchronize") == 2, record.table("waits")
    unpinned = "--no-pin-cpu-grads" in str(OFFLOADED[name].line)
    assert (record.count("waits", containing="_copy_down") > 0) == unpinned, record.table("waits")
    other = [
        key
        for key in record.waits
        if "offload.py" in key[2] and not any(w in key[2] for w in ("on_host", "_copy_down"))
    ]
    assert {kind for _, kind, _ in other} == {"event.synchronize"}


@pytest.mark.parametrize("name", parameters(GENERATED))
def test_generation_on_a_gpu_is_that_on_a_cpu(jobs: Jobs, name: str) -> None:
    found = jobs.on_gpus(name)
    assert not errors(found), "\n".join(errors(found))
    gpu, cpu = found[0], found[0]["cpu"]
    assert gpu["tokens"] == cpu["tokens"]
    for mine, theirs in zip(gpu["log_probs"], cpu["log_probs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    replays = Record.from_json(gpu["record"]).count("launches", "generate", "graph replay")
    assert (replays > 0) == ("graph" in name)


@pytest.mark.parametrize("name", parameters({n: c for n, c in ONE_RANK.items() if c.flash_attn}))
def test_flash_attn_computes_what_it_is_faster_at(jobs: Jobs, name: str) -> None:
    """On architecture 9.0: documents and windows; plain attention is torch's, which has programs for that GPU."""
    record = Record.from_json(jobs.on_gpus(name)[0]["record"])
    function = "flash_attn_varlen_func" if "documents" in name else "flash_attn_func"
    wanted = "window" in name or "documents" in name
    assert (record.count("choices", containing=function) > 0) == wanted, record.table("choices")


@pytest.mark.parametrize("name", parameters({n: ONE_RANK[n] for n in ("window", "documents")}))
def test_rules_of_who_sees_whom_go_to_torchs_variable_length_attention(jobs: Jobs, name: str) -> None:
    """Without flash-attn; a table of s x s entries is for masks that no kernel takes."""
    record = Record.from_json(jobs.on_gpus(name)[0]["record"])
    assert record.count("choices", containing="varlen_attn") > 0, record.table("choices")


@pytest.mark.parametrize("name", parameters({n: ONE_RANK[n] for n in ("llama fp32",)}))
def test_grouped_heads_in_fp32_store_no_matrix(jobs: Jobs, name: str) -> None:
    record = Record.from_json(jobs.on_gpus(name)[0]["record"])
    assert record.count("choices", containing="attention math") == 0, record.table("choices")
