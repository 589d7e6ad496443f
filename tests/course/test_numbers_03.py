"""Every number that lab 03 states, computed again: a sentence that has changed, or is wrong, fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest
import torch

from minimegatron.parallel.pipeline.actions import Action, Schedule
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, peak_live, simulate
from minimegatron.parallel.pipeline.schedules import alternate, build_schedule, interleaved_table, interleaved_warmup

FOLDER = Path(str(import_module("course.03_pipeline_1f1b").__file__)).parent
PREDICTED = import_module("course.03_pipeline_1f1b.checks.predicted")
GRADIENTS = import_module("course.03_pipeline_1f1b.checks.gradients")
EXECUTOR = import_module("course.03_pipeline_1f1b.checks.executor")
SCHEDULES = import_module("course.03_pipeline_1f1b.checks.schedules")
HALVES = import_module("course.03_pipeline_1f1b.checks.halves")
WARM_UP = import_module("course.03_pipeline_1f1b.checks.warm_up")


def prose(text: str) -> str:
    """The lab's text in one line: a sentence is found wherever its lines end."""
    return re.sub(r"\s+", " ", re.sub(r"^# ?", "", text, flags=re.M))


LAB = prose((FOLDER / "lab.py").read_text())


def planned(name: str, p: int, m: int) -> Simulation:
    schedule = build_schedule(name, p, m)
    return simulate(schedule, Costs().divided(schedule.v))


def words(name: str, p: int, m: int, rank: int) -> list[str]:
    schedule = build_schedule(name, p, m)
    return [schedule.label(action) for action in schedule.actions[rank]]


def _numbers() -> list[str]:
    """The sentences, each number put in."""
    params = 175e9 * 16
    h, t, layers, stages = 12288, 8, 96, 8
    kept = 34 * h / t * 2048 * layers / stages
    two = planned("gpipe", 2, 2)
    inter, one = planned("interleaved", 4, 8), planned("1f1b", 4, 8)
    y = math.tanh(1)
    run = PREDICTED._BY_HAND
    tiny = PREDICTED.answers(**run)
    a, b, c, d = (
        words("1f1b", 4, 3, 2),
        words("interleaved", 2, 4, 1),
        words("zb_h1", 2, 3, 0),
        interleaved_table(4, 2, 2),
    )
    graph = EXECUTOR._graph(**EXECUTOR._HAND)
    tied = GRADIENTS._tied([{"grad": torch.tensor([1, 2])}, {"grad": torch.tensor([10, 20])}])
    return [
        f"GPT-3 has {layers} layers and 175 billion parameters: {params / 1e12:.1f} TB with gradients",
        f"leaves {params / 8 / 1e9:.0f} GB for each; a GPU has 80",
        f"NVLink moves {900 // 2} GB/s each way, the network card of a GPU {400 // 8} GB/s",
        f"Each rank works 2 · (1 + 2) = {two.busy[0]} steps of {two.makespan} and waits {two.makespan - two.busy[0]}.",
        f"idle time over *work*: here {two.makespan - two.busy[0]}/{two.busy[0]}.",
        f"For p = m = 2 and v = 1 it is {PREDICTED.bubble(2, 2, 1):g}.",
        "With p ranks, the last one waits for p-1 forwards, and p-1 backwards come after it.",
        f"For GPT-3 rank 0 keeps {peak_live(build_schedule('1f1b', 8, 64))[0]} in place of 64, "
        f"{8 * kept / 1e9:.1f} GB in place of {64 * kept / 1e9:.1f}.",
        f"its list is {a[0]}, then {a[1]} {a[2]}, {a[3]} {a[4]}, then {a[5]}.",
        "| forward: microbatch.chunk | " + " | ".join(f"{i}.{chunk}" for i, chunk in d) + " |",
        "| backward | " + " | ".join(f"{i}.{1 - chunk}" for i, chunk in d) + " |",
        f"rank 1 of these two warms up with 2·0 + 1·2 = {interleaved_warmup(2, 1, 2, 2)} forwards. Its list begins "
        f"{b[0]} {b[1]}, then {b[2]} {b[3]}, {b[4]} {b[5]}, {b[6]} {b[7]}, ...",
        f"a microbatch crosses {4 * 2 - 1} borders in place of {4 - 1}",
        f"rank 0 keeps {inter.peak_live[0]} chunks, each half as large as before, where 1F1B kept "
        f"{one.peak_live[0]} whole",
        f"y = ({y:.3f}, {y:.3f}), dz = ({1 - y * y:.2f}, {1 - y * y:.2f})",
        f"So B returns dx = ({1 - y * y:.2f}, {1 - y * y:.2f}), and W adds {1 - y * y:.2f} to each of the four entries",
        f"rank 0 of p = 2 keeps {peak_live(build_schedule('1f1b', 2, 3))[0]} activations when it first goes back, so "
        f"it can put no W aside. With m = 3 its list is {c[0]}, {c[1]} {c[2]} {c[3]}, {c[4]} {c[5]} {c[6]}, {c[7]} "
        f"{c[8]}.",
        f"then both return ({tied[0][0]}, {tied[0][1]})",
        f"The answer is {str(EXECUTOR.crossed(**EXECUTOR._SHORT)).replace(chr(39), chr(34))}.",
        "rank 1 sends the results of F0.0, B0.1, F1.0 and B0.0 to rank 0, which posts for F0.1, F1.1, B0.1 and B0.0.",
        f"Then dx is {graph['dx'][0].item():g} and {graph['dx'][1].item():g}, and the gradient of w ends as 1 · 3 + "
        f"10 · 5 = {graph['grad'].item():g}.",
        f"for p = {run['p']}, m = {run['m']} and v = {run['v']}, with {run['layers']} layers, {run['tokens']} tokens, "
        f"hidden size {run['hidden']} and {run['kept_bytes_per_token_and_layer']} kept bytes: the idle share is "
        f"6/{6 / tiny['idle_share']:g}; {tiny['microbatches_for_5_percent']} microbatches; rank 0 keeps 3 microbatches "
        f"in 2 layers, 3 · 2 · 7 · 13 = {tiny['kept_bytes_on_rank_0']} bytes; and 5 microbatches cross 2 borders both "
        f"ways with 7 · 11 numbers of 2 bytes, 5 · 2 · 2 · 7 · 11 · 2 = {tiny['bytes_between_ranks']} bytes.",
        f"with p = 8 and v = 4, {PREDICTED._fewest(8, 4, in_groups=False)} microbatches would be enough, and the next "
        f"multiple of 8 is {PREDICTED._fewest(8, 4)}.",
    ]  # fmt: skip


@pytest.mark.parametrize("sentence", _numbers(), ids=lambda s: s[:40])
def test_the_lab_says_so(sentence: str) -> None:
    assert prose(sentence) in LAB


def test_the_table_by_hand_is_the_plan_of_two_ranks_and_two_microbatches() -> None:
    spans = planned("gpipe", 2, 2).spans
    moments = sorted({moment for row in spans for s in row for moment in (s.start, s.end)})
    for start, end in zip(moments, moments[1:], strict=False):
        did = [
            next((f"{s.action.kind}{s.action.microbatch}" for s in row if s.start <= start < s.end), "waits")
            for row in spans
        ]
        assert f"| {start} to {end} | {did[0]} | {did[1]} |" in LAB


def test_three_of_four_ranks_wait_while_one_microbatch_passes() -> None:
    plan = planned("gpipe", 4, 1)
    assert plan.makespan == sum(plan.busy) and "At every moment three of four ranks wait." in LAB


def test_the_claims_about_bubbles() -> None:
    bubble = {name: planned(name, 4, 8).bubble for name in ("gpipe", "1f1b", "interleaved", "zb_h1")}
    assert bubble["gpipe"] == bubble["1f1b"] and "The bubble is the same: 1F1B does not make" in LAB
    assert bubble["interleaved"] == bubble["1f1b"] / 2 and "The bubble is half that of 1F1B." in LAB
    assert bubble["zb_h1"] == bubble["1f1b"] / 3 and "equally long, the bubble is a third of that of 1F1B" in LAB
    assert max(peak_live(build_schedule("zb_h1", 4, 8))) == peak_live(build_schedule("1f1b", 4, 8))[0]
    for p, m in ((3, 6), (4, 8)):
        assert planned("zb_v", p, m).bubble * 6 == planned("1f1b", p, m).bubble
        schedule = build_schedule("zb_v", p, m)
        assert max(peak_live(schedule)) / 2 <= p, "no more than 1F1B keeps on rank 0"
        crossing = [len(schedule.messages(a, b)) for a in range(p) for b in range(p) if a != b]
        straight = build_schedule("1f1b", p, m)
        assert sum(crossing) == 2 * sum(len(straight.messages(a, b)) for a in range(p) for b in range(p) if a != b)
    assert "twice the messages between ranks" in LAB
    assert "The bubble is then a sixth of that of 1F1B, and no rank keeps more than rank 0 of 1F1B does." in LAB


@pytest.mark.parametrize("p", range(2, 9))
def test_no_rank_of_zb_v_is_idle_inside_from_2p_minus_1_microbatches_on(p: int) -> None:
    whole = [m for m in range(1, 3 * p + 1) if not any(planned("zb_v", p, m).inner_bubbles)]
    assert whole == list(range(2 * p - 1, 3 * p + 1))
    assert "m is at least 2p-1, no rank is idle between its first and its last action." in LAB
    assert "at least 2p-1 microbatches, and an optimizer step" in LAB


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_on_a_v_rank_0_goes_back_first_and_in_1f1b_it_waits_longest(p: int) -> None:
    def first_backward(name: str) -> list[Fraction]:
        return [min(Fraction(s.start) for s in row if s.action.kind == "B") for row in planned(name, p, 2 * p).spans]

    straight, on_a_v = first_backward("1f1b"), first_backward("zb_v")
    assert straight[0] == max(straight) > straight[1] and on_a_v[0] == min(on_a_v) < on_a_v[1]
    assert "In 1F1B rank 0 waits longest for its first backward; on a V it is the first that goes back." in LAB


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_from_2p_microbatches_on_bubbles_halve_and_only_gpipe_keeps_more(p: int) -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"):
        for m in (2 * p, 4 * p):
            few, many = planned(name, p, m), planned(name, p, 2 * m)
            assert many.bubble == few.bubble / 2
            assert max(many.peak_live) == max(few.peak_live) * (2 if name == "gpipe" else 1)
    assert planned("zb_v", p, 2 * p).bubble == planned("zb_v", p, p).bubble / 4
    assert max(planned("interleaved", p, 2 * p).peak_live) > max(planned("interleaved", p, p).peak_live)
    assert "From m = 2p on, doubling m halves every bubble, and only GPipe's point moves to the right as well" in LAB
    assert "From m = p to 2p ZB-V gains more: its bubble falls to a quarter" in LAB


def test_half_the_warm_up_is_as_fast_only_while_messages_are_free() -> None:
    table = interleaved_table(32, 4, 8)
    back = [(i, 3 - c) for i, c in table]
    place = build_schedule("interleaved", 8, 32, 4).placement

    def bubble(factor: int, latency: Fraction) -> Fraction:
        rows = tuple(alternate(table, back, factor * (7 - r) + 3 * 8) for r in range(8))
        return Fraction(simulate(Schedule("f", rows, place), Costs(latency=latency / 4).divided(4)).bubble)

    assert bubble(1, Fraction(0)) == bubble(2, Fraction(0))
    assert all(bubble(1, late) > bubble(2, late) for late in (Fraction(1, 10), Fraction(1, 2)))
    assert round(100 * float(bubble(1, Fraction(0))), 1) == 5.5 and "both have a bubble of 5.5 %" in LAB
    assert "37 %" not in LAB and "37.0" not in LAB, "no text gives the guess away"


def test_the_slightest_latency_costs_as_much_memory_as_half_a_turn() -> None:
    def kept(late: int) -> int:
        return 1 + int(WARM_UP.enough(10, 20, [late] * 7)[0])

    assert [kept(late) for late in (0, 1, 15, 16, 30, 31)] == [8, 15, 15, 22, 22, 29]
    assert "1 ms there costs as much memory as 15." in LAB
    trip = 8 * 30 + 14 * 1
    assert f"8 · 30 + 14 · 1 = {trip} ms, so {-(-trip // 30)} in flight would fill that time" in LAB
    assert "enough while a message takes at most half of F + B. Each further half of F + B costs rank 0 one more" in LAB
    assert f"search, within {SCHEDULES.BEAT.seconds:.0f} seconds: it may import" in LAB


def test_the_example_by_hand_of_the_split_backward_is_the_first_case() -> None:
    one = HALVES._halves(**HALVES._ONE)
    assert (
        {round(float(x), 2) for x in one["grad"].flatten()} == {0.42} == {round(float(x), 2) for x in one["dx"][0][0]}
    )


def test_1f1b_is_as_fast_as_gpipe_only_while_messages_are_free() -> None:
    def bubble(name: str, m: int, latency: Fraction) -> float:
        return round(100 * float(simulate(build_schedule(name, 8, m), Costs(latency=latency)).bubble), 1)

    late = Fraction(1, 10)
    for m in (32, 128):
        assert bubble("gpipe", m, Fraction(0)) == bubble("1f1b", m, Fraction(0))
    assert [bubble(name, m, late) for m in (32, 128) for name in ("gpipe", "1f1b")] == [23.3, 29.0, 5.8, 11.6]
    twice = [alternate([(i, 0) for i in range(32)], [(i, 0) for i in range(32)], 2 * (7 - r)) for r in range(8)]
    longer = Schedule("longer", tuple(twice), build_schedule("1f1b", 8, 32).placement)
    assert (
        simulate(longer, Costs(latency=late)).bubble
        == simulate(build_schedule("gpipe", 8, 32), Costs(latency=late)).bubble
    )
    assert (
        "So the bubble is the same only if messages are free." in LAB and "a longer warm-up, which costs memory" in LAB
    )


def test_where_w_is_shorter_zb_h1_is_no_third_and_interleaving_is_better() -> None:
    def bubble(name: str, v: int) -> Fraction:
        plan = simulate(build_schedule(name, 8, 32, v), Costs(backward_weight=Fraction(1, 2)).divided(v))
        return Fraction(plan.bubble)

    assert bubble("zb_h1", 1) / bubble("1f1b", 1) == Fraction(3, 5)
    assert bubble("interleaved", 2) / bubble("1f1b", 1) == Fraction(1, 2)


def as_units(schedule: Schedule, costs: Costs) -> Fraction:
    """The makespan where an F and the undivided B of the other chunk behind it begin and end together."""
    ends = dict[tuple[int, object], Fraction]()
    place, free = [0] * schedule.p, [Fraction(0)] * schedule.p
    while any(at < len(row) for at, row in zip(place, schedule.actions, strict=True)):
        for rank, row in enumerate(schedule.actions):
            unit = list(row[place[rank] : place[rank] + 1])
            for b in row[place[rank] + 1 : place[rank] + 2]:
                whole = b.kind == "B" and not schedule.is_split(b.microbatch, schedule.stage_of(rank, b.chunk))
                unit += [b] * (unit[0].kind == "F" and whole and b.chunk != unit[0].chunk)
            needs = [need for one in unit for need in schedule.needs(rank, one)]
            needs = [(there, a) for there, a in needs if there != rank or a not in unit]
            if unit and all(need in ends for need in needs):
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = start + sum(Fraction(costs.of(schedule, rank, one)) for one in unit)
                ends |= {(rank, one): free[rank] for one in unit}
                place[rank] += len(unit)
    return max(free)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_pairs_that_run_as_one_unit_double_the_bubble_of_dualpipe_v(p: int, m: int) -> None:
    """DeepSeek's formula: with 2p stages (p-1) (F&B + B - 3W), in units of a chunk's forward (p-1) (3 + 2 - 3)."""
    bubble = as_units(build_schedule("dualpipe_v", p, m), Costs().divided(2)) - 3 * m
    assert 2 * bubble == 2 * (p - 1) == 4 * (planned("dualpipe_v", p, m).makespan - 3 * m)
    assert bubble / (3 * m) == Fraction(p - 1, 3 * m) == planned("zb_h1", p, m).bubble
    assert "Then the bubble is 2(p-1) chunks' forwards, twice what is drawn above: as large as ZB-H1's" in LAB
    assert "max(bubble, (p - 1) / (3 * m))" in LAB


def test_gpipe_as_it_was_published_recomputes() -> None:
    one, whole = 2 * 2048 * 12288 // 8, 34 * 12288 // 8 * 2048 * 12
    assert round((64 * one + whole) / 1e9, 1) == 1.7 and round(64 * whole / 1e9, 1) == 82.1
    assert "a stage keeps only the *input* of each microbatch, and runs its forward once more" in LAB


def test_the_idle_share_that_is_guessed() -> None:
    assert round(100 * (1 - 3 * 8 / float(planned("1f1b", 8, 8).makespan)), 1) == 46.7
    assert "46.7" not in LAB, "no text gives the guess away"


def test_zb_h1_cannot_be_beaten_with_one_chunk_a_rank() -> None:
    half = Costs(backward_weight=Fraction(1, 2))
    zb, inter = build_schedule("zb_h1", 4, 8), build_schedule("interleaved", 4, 8, 2)
    assert simulate(zb, half).makespan == Fraction(49, 2) and max(peak_live(zb)) == 4
    assert simulate(inter, half.divided(2)).makespan == Fraction(95, 4) and max(peak_live(inter)) == 11
    assert "| ZB-H1 | 24.5 | 4 | | interleaved, two chunks | 23.75 | 5.5 |" in LAB
    last = 3 + 8 + 8 + 4 * Fraction(1, 2)  # F and B of rank 3, and the W that make room for its last F
    assert last == 21 and last + 3 + Fraction(1, 2) == Fraction(49, 2)
    assert "ends at 3 + 8 + 8 + 2 = 21 at the earliest; three more B and rank 0's last W end at 24.5." in LAB


def short_warm_up(aside: Callable[[int], int] | None) -> Schedule:
    """Interleaved lists of 4 ranks and 8 microbatches with factor 1, whole or with W put aside by rank."""
    table = interleaved_table(8, 2, 4)
    back = [(i, 1 - c) for i, c in table]
    rows = []
    for rank in range(4):
        whole = alternate(table, back, 3 - rank + 4)
        if aside is None:
            rows.append(whole)
            continue
        row, late = list[Action](), list[Action]()
        for action in whole:
            row.append(action)
            late += [Action("W", action.microbatch, action.chunk)] * (action.kind == "B")
            if len(late) > aside(rank):
                row.append(late.pop(0))
        rows.append((*row, *late))
    return Schedule("short", tuple(rows), build_schedule("interleaved", 4, 8, 2).placement)


def test_fewer_than_23_steps_need_two_chunks_halves_and_w_put_aside() -> None:
    def costs(schedule: Schedule) -> tuple[Fraction, float]:
        takes = simulate(schedule, Costs(backward_weight=Fraction(1, 2)).divided(2)).makespan
        return Fraction(takes), max(peak_live(schedule)) / 2

    assert costs(short_warm_up(None)) == (Fraction(95, 4), 4)
    assert "| the same, warm-up with factor 1 | 23.75 | 4 |" in LAB
    assert costs(short_warm_up(lambda rank: 0)) == (SCHEDULES._STEPS, 4)
    assert costs(short_warm_up(lambda rank: rank)) == (Fraction(89, 4), 4)
    assert "That takes 22.25 steps." in SCHEDULES.BEAT.hint
    assert peak_live(short_warm_up(None)) == [8 - rank for rank in range(4)] and "keeps 8 - r" in SCHEDULES.BEAT.idea
    assert f"Four lists that take fewer than {SCHEDULES._STEPS} steps, and keep at most 4" in LAB
    assert costs(build_schedule("zb_v", 4, 8)) == (Fraction(43, 2), 4) and Fraction(3, 2) + 20 == Fraction(43, 2)
    assert "rank 3 begins at 1.5 and works 20 steps, so no lists take less than 21.5." in LAB
    assert "ZB-V, which comes next, takes 21.5 here and keeps 4." in LAB


def test_a_head_of_128_k_words_is_worth_two_layers_and_sets_the_pace() -> None:
    h, ffn, kv, words = 4096, 14336, 1024, 128256  # Llama 3 8B
    layer, head = 2 * h * h + 2 * h * kv + 3 * h * ffn, words * h
    assert [round(head / (layer + s * h), 1) for s in (0, 4096, 8192)] == [2.4, 2.2, 2.1]

    def idle(layers: list[int], head: float) -> tuple[list[float], float]:
        cost = [Fraction(n) for n in layers]
        cost[-1] += Fraction(head).limit_denominator(100)
        plan = simulate(build_schedule("1f1b", 4, 64), Costs(cost, cost, cost))
        return [100 * float(1 - busy / plan.makespan) for busy in plan.busy], float(plan.makespan)

    (equal, _), (uneven, slow), (cut, fast) = idle([8] * 4, 0), idle([8] * 4, 2.2), idle([9, 9, 8, 6], 2.2)
    assert round(equal[0], 1) == 4.5 == round(300 / 67, 1) and round(uneven[0]) == 24 and 10.2 / 8 == 1.275
    assert fast < 0.9 * slow and round(cut[0]) == 4
    assert "idle for 3/67 of the time, 4.5 %" in LAB and "the step is more than a tenth shorter" in LAB
    assert "So with 4,096 tokens the last stage takes 10.2 where the others take 8." in LAB and "24 %" not in LAB


def test_interleaving_on_two_ranks_crosses_where_pairs_are_sent_in_the_other_order() -> None:
    for rank, count in ((0, 12), (1, 12)):
        log = EXECUTOR._log(8, 2, rank)
        wrong = EXECUTOR.crossed(**log)
        assert len(log["sent"]) == 24 and len(wrong) == count
        assert all(wanted[0] != came[0] for wanted, came in wrong)
        assert EXECUTOR.crossed(**EXECUTOR._log(8, 2, rank, fused=False)) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("p", range(2, 7))
def test_a_receiver_takes_messages_in_the_order_of_its_own_list(name: str, p: int) -> None:
    """And on a V it does not; so `execute` posts by its own list."""

    def in_order(schedule: Schedule) -> bool:
        for there in range(schedule.p):
            for here in set(range(schedule.p)) - {there}:
                wanted = [schedule.input_of(here, a) for a in schedule.actions[here]]
                taken = [m for m in wanted if m is not None and schedule.source_of(m) == there]
                if taken != schedule.messages(there, here):
                    return False
        return True

    for m in (p, 2 * p, 3 * p):
        chunks = (2, 3) if name == "interleaved" else (1,)
        assert all(in_order(build_schedule(name, p, m, v) if v > 1 else build_schedule(name, p, m)) for v in chunks)
    assert not in_order(build_schedule("zb_v", p, 2 * p)) and "on a V it is not" in LAB


def test_the_table_of_a_fixed_batch() -> None:
    rows = [(1024, p) for p in (2, 4, 8, 16)] + [(gpus, 8) for gpus in (2048, 4096, 8192)]
    bubbles = [Fraction(p - 1, 1024 // (gpus // (8 * p))) for gpus, p in rows]
    assert [round(100 * float(b), 1) for b in bubbles] == [6.2, 9.4, 10.9, 11.7, 21.9, 43.8, 87.5]
    assert "for gpus, p in ((1024, 2), (1024, 4), (1024, 8), (1024, 16), (2048, 8), (4096, 8), (8192, 8)):" in LAB
