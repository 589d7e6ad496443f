"""Lab 10's checks: what the judge takes for right, beside the package's cache, kernels, scheduler and speculation."""

from __future__ import annotations

import random

import pytest
import torch
from course.lab10.own_scheduler import planned_by

from labkit.exercises import Draw
from minimegatron.errors import ConfigError
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.paged_cache import PagedCache, bytes_per
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import Request
from minimegatron.inference.speculative import verified
from minimegatron.kernels.paged import Scores, paged_attention
from minimegatron.layers.inference_context import StateSpec
from tests.course.marked import LABS

LAB = LABS["10_inference_serving"].lab


def drawn(exercise, seed):
    """The inputs of the hidden cases, one after the other."""
    return [case.inputs(Draw(seed)) for case in LAB[exercise].cases if case.hidden]


@pytest.mark.parametrize("seed", range(3))
def test_a_token_leaves_as_many_bytes_as_the_cache_keeps(seed):
    [inputs] = drawn("decode_step", seed)
    model, dtypes = inputs["model"], {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
    spec = StateSpec((model["groups"], model["d"]))
    state = {number: {"key": spec, "value": spec} for number in range(model["layers"])}
    assert LAB["decode_step"].reference(**inputs)["token"] == bytes_per(state, "token", dtypes[model["bytes"]])


@pytest.mark.parametrize("seed", range(3))
def test_the_head_attends_as_the_packages_does(seed):
    for inputs in drawn("attend", seed):
        q, k, v, kept, table = (inputs[name] for name in ("q", "k", "v", "kept", "table"))
        pages, size, d = inputs["keys"].shape
        spec = StateSpec((1, d))
        cache = PagedCache({1: {"key": spec, "value": spec}}, pages, size, 1, torch.float32, torch.device("cpu"))
        context = cache.context([len(q)], [kept], [table], [0])
        both = cache.layers[1]
        for name, new in (("key", k), ("value", v)):
            both[name].copy_(inputs[f"{name}s"].unsqueeze(2))
            both[name].flatten(0, 1)[context.rows] = new.unsqueeze(1)
        want = paged_attention(q.unsqueeze(1), both["key"], both["value"], context, Scores(d**-0.5))
        told = LAB["attend"].reference(**inputs)
        torch.testing.assert_close(told["out"], want.squeeze(1))
        torch.testing.assert_close(told["keys"], both["key"].squeeze(2), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(20))
def test_the_pages_that_are_there_are_those_that_the_engines_allocator_finds(seed):
    """In its own order: it evicts a page only when nobody has it, and the index hears of it then."""
    draw, size, table = random.Random(seed), 2, BlockManager(14, 2)
    calls, want, held = [], [], []
    for _ in range(30):
        tokens = [draw.randint(0, 1) for _ in range(draw.randint(1, 9))]
        pages, parent = table.find(tokens, root=(0, ""))
        calls.append(["known", tokens])
        want.append(list(pages))
        found = len(pages)
        for page in pages:
            table.share(page)
        while len(pages) < table.pages_for(len(tokens)):
            while not table.available:
                for page in reversed(held.pop(0)):
                    table.release(page)
            evicted, pages = table.evicted, [*pages, table.take()]
            if table.evicted > evicted:
                calls.append(["forget", pages[-1]])
        table.remember(tokens, pages, len(tokens), found, parent)
        calls.append(["keep", tokens, pages])
        held.append(pages)
    assert table.evicted > 3 and sum(map(len, want)) > 10
    assert LAB["prefixes"].reference(size, calls) == want


def played(scheduler, seed):
    """The steps of requests that come at any time; the words are always the same, the lengths are drawn."""
    draw, steps, number = random.Random(seed), [], 0
    while number < 12 or scheduler.has_work:
        while number < 12 and draw.random() < 0.5:
            scheduler.add(Request((1,) * draw.randint(1, 17), draw.randint(1, 9)), f"{number}")
            number += 1
        step = scheduler.schedule()
        steps.append([(chunk.sequence.request_id, chunk.start, chunk.count, chunk.draws) for chunk in step.chunks])
        for chunk in step.chunks:
            scheduler.computed(chunk)
            if chunk.draws:
                chunk.sequence.append(1)
                if chunk.sequence.reason is not None:
                    scheduler.finish(chunk.sequence)
    return steps, scheduler.preemptions


def test_the_judges_plan_is_that_of_the_engines_scheduler():
    """In one out of three no page is ever short."""
    lost = []
    for seed in range(30):
        size = 1 + seed % 5
        pages = 1 + max(30 // size, -(-26 // size)) if seed % 3 else 200
        sizes = 2 + seed % 4, 6 + seed % 7, 100
        ours, preempted = played(Scheduler(BlockManager(pages, size, reuse=False), *sizes), seed)
        planned = planned_by(LAB["schedule"].reference)
        assert played(planned(BlockManager(pages, size, reuse=False), *sizes), seed) == (ours, preempted)
        lost.append(preempted)
    assert 0 in lost and sum(lost) > 10


@pytest.mark.parametrize("seed", range(20))
def test_a_place_is_verified_as_the_engine_does_it(seed):
    inputs = drawn("verify", seed)[0]
    u, v = (torch.tensor(inputs[name], dtype=torch.float64) for name in "uv")
    k = len(inputs["proposed"])
    place_by_place = verified(inputs["p"][:k], inputs["q"], torch.tensor(inputs["proposed"]), u, v[:k]).tolist()
    told = LAB["verify"].reference(**inputs)
    assert told[:k] == place_by_place[: len(told[:k])]
    assert all(told[i] == inputs["proposed"][i] for i in range(len(told) - 1))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"preempted": [], "chunks": [("x", 1)]}, "neither runs nor waits"),
        ({"preempted": [], "chunks": [("a", 5)]}, "5 tokens of `a`"),
        ({"preempted": [], "chunks": [("a", 4), ("b", 4)]}, "more than 6 tokens"),
        ({"preempted": [], "chunks": [("a", 4), ("b", 1), ("c", 1)]}, "no seat"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan, words):
    scheduler = planned_by(lambda *_: plan)(BlockManager(9, 4, reuse=False), 2, 6, 20)
    for name in "abc":
        scheduler.add(Request((1, 2, 3, 4), 3), name)
    with pytest.raises(ConfigError, match=words):
        scheduler.schedule()


def test_a_plan_knows_no_pages_that_are_found_again():
    with pytest.raises(ConfigError, match="found again"):
        planned_by(lambda *_: {})(BlockManager(9, 4), 2, 6, 20)


def test_the_labs_tool_brings_no_scheduler_into_a_judged_program(nursery):
    stolen = "from course.lab10.own_scheduler import Scheduler\n\n\ndef schedule(*args):\n    return Scheduler(*args)\n"
    verdict = LABS["10_inference_serving"].check(nursery, "schedule", stolen)
    assert (verdict.state, verdict.points) == ("wrong", 0) and "`minimegatron.inference" in verdict.note, verdict
