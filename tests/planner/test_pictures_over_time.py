"""Memory over a step: as full as planned, as many microbatches as the schedule keeps, and nothing left at the end."""

from __future__ import annotations

import pytest

from minimegatron.memory import Sample
from minimegatron.models.chunks import schedule_of
from minimegatron.parallel.pipeline.schedule_sim import peak_live
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.pictures import course
from minimegatron.planner.planning import Plan, plan, without_host
from minimegatron.planner.timing import stages_of_run
from minimegatron.training.arguments import parse_args

SMALL = "--preset laptop-10m --bf16 --seq-length 512 --micro-batch-size 1 --num-layers 8 --vocab-size 512"
PP4 = "--pipeline-model-parallel-size 4 --pipeline-schedule"
V2 = "--num-virtual-stages-per-pipeline-rank 2"


def planned(flags: str, world: int, batch: int) -> Plan:
    words = f"{SMALL} --global-batch-size {batch} {flags}".split()
    return plan(parse_args(words, world, reads=False), world, CLUSTERS["h100"])


def fullest(samples: list[Sample]) -> Sample:
    return max(samples, key=lambda sample: sample.total)


@pytest.mark.parametrize(
    "flags, world, batch, drawn",
    [
        ("", 1, 8, 4),
        ("--data-parallel-sharding-strategy optim_grads_params --optimizer-cpu-offload", 2, 4, 2),
        (f"{PP4} 1f1b", 4, 32, 16),
        (f"{PP4} 1f1b --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full", 8, 6, 6),
        (f"{PP4} gpipe", 4, 24, 24),
        (f"{PP4} interleaved {V2}", 4, 32, 16),
        (f"{PP4} zb_h1", 4, 32, 16),
        (f"{PP4} zb_v", 4, 32, 16),
    ],
)
def test_the_fullest_sample_is_the_planned_peak_owner_by_owner(flags: str, world: int, batch: int, drawn: int) -> None:
    told = planned(flags, world, batch)
    passed = course(told)
    assert (passed.microbatches, passed.total) == (drawn, batch // told.run.parallel.data_parallel_size(world))
    for rank, samples in passed.ranks.items():
        assert dict(fullest(samples).owners) == without_host(told.memory[rank].peak)
        seconds = [sample.seconds for sample in samples]
        assert seconds == sorted(seconds) and seconds[-1] == passed.ranks[0][-1].seconds
        for sample in samples[:1] + samples[-1:]:
            assert sample.total == sum(without_host(told.memory[rank].lasting).values()), "what comes goes again"
        for owner, n in without_host(told.memory[rank].lasting).items():
            assert {sample.owners[owner] for sample in samples} == {n}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", f"interleaved {V2}", "dualpipe_v"])
def test_between_its_actions_a_rank_keeps_what_the_schedule_says(name: str) -> None:
    """Rank 1 has neither end of the model, so all its chunks keep as much."""
    told = planned(f"{PP4} {name}", 4, 12)
    cut, z, _ = stages_of_run(told.run, 4, CLUSTERS["h100"])
    samples = course(told).ranks[1]
    kept = sum(told.memory[1].kept.values()) // cut.chunks
    still = [sample.owners.get("activations", 0) for sample in samples[1:] if not sample.where]
    assert max(still) == peak_live(schedule_of(cut, z.mesh.parallel, 12))[1] * kept


def test_activations_pile_up_forward_and_go_backward() -> None:
    samples = course(planned("", 1, 1)).ranks[0]
    kept = [sample.owners.get("activations", 0) for sample in samples]
    top = kept.index(max(kept))
    assert kept[:top] == sorted(kept[:top]) and len(set(kept[:top])) > 8, "layer by layer"
    assert kept[top:] == sorted(kept[top:], reverse=True)


def test_the_optimizer_takes_its_time_behind_the_passes() -> None:
    told = planned("", 1, 2)
    *_, behind, end = course(told).ranks[0]
    assert told.time is not None
    assert end.seconds - behind.seconds == pytest.approx(told.time.parts["optimizer"])
    assert end.seconds == pytest.approx(told.time.seconds)
