"""The judge: right answers pass in whatever form, wrong ones lose points with the right hint, cheats score nothing."""

from __future__ import annotations

import pytest

from labkit import player
from labkit.exercises import load_lab
from labkit.fresh import Nursery
from labkit.judge import CourseError, judge
from labkit.nursery import Limits
from labkit.playing import _waiting
from labkit.replies import Reply
from labkit.verdict import Verdict
from minimegatron.errors import ConfigError, RankError
from minimegatron.launch.procs import Frame
from tests.labkit.cheats import CHEATS
from tests.thorough import mostly_thorough

COURSE = "tests.labkit.mini_course"
RING = """
import torch
import torch.distributed as dist

def ring_all_reduce(x):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, travelling = x.clone(memory_format=torch.contiguous_format), x.contiguous()
    for _ in range(world - 1):
        arriving = torch.empty_like(total)
        sent = dist.isend(travelling, (rank + 1) % world)
        dist.recv(arriving, (rank - 1) % world)
        sent.wait()
        total += arriving
        travelling = arriving
    return total
"""


def check(nursery: Nursery, exercise: str, source: str, **others: str) -> Verdict:
    return judge(nursery, COURSE, exercise, {exercise: source, **others})


def stub(name: str) -> str:
    return f"def {name}(*args, **kwargs):\n    raise NotImplementedError('your code here')\n"


def notes(verdict: Verdict) -> list[str]:
    return [row.note for row in verdict.rows]


# ------------------------------------------------------------------------------------------------ right answers


@pytest.mark.parametrize(
    "source",
    [
        "def bubble(p, m):\n    return (p - 1) / (m + p - 1)",
        "from fractions import Fraction\ndef bubble(p, m):\n    return float(1 - Fraction(m, m + p - 1))",
        "import torch\ndef bubble(p, m):\n    return torch.tensor((p - 1) / (m + p - 1), dtype=torch.float64)",
        "import numpy\nbubble = lambda m, p: numpy.float64(p - 1) / (m + p - 1)",
    ],
)
def test_right_answers_of_any_form_pass(nursery: Nursery, source: str) -> None:
    verdict = check(nursery, "bubble", source)
    assert (verdict.state, verdict.points, verdict.of) == ("passed", 5, 5)
    assert verdict.mistake == verdict.idea == ""
    assert repr(verdict).split() == ["✔", "bubble", "passed", "5/5"]


@pytest.mark.parametrize(
    "source",
    [
        RING.replace("x.contiguous()", "x.clone().contiguous()"),
        RING.replace("sent = dist.isend(travelling, (rank + 1) % world)", "pass").replace(
            "dist.recv(arriving, (rank - 1) % world)\n        sent.wait()",
            "[q.wait() for q in dist.batch_isend_irecv([dist.P2POp(dist.isend, travelling, (rank + 1) % world),"
            " dist.P2POp(dist.irecv, arriving, (rank - 1) % world)])]",
        ),
    ],
    ids=["isend", "batch"],
)
def test_right_rings_pass(nursery: Nursery, source: str) -> None:
    assert check(nursery, "ring_all_reduce", source).points == 6


def test_a_drive_reaches_the_gradient(nursery: Nursery) -> None:
    assert check(nursery, "double", "def double(x):\n    return 2 * x").state == "passed"
    verdict = check(nursery, "double", "def double(x):\n    return 2 * x.detach() + x - x.detach()")
    assert verdict.points == 0 and notes(verdict)[0].startswith("grad: got")


# ------------------------------------------------------------------------------------------------------ not done


def test_a_stub_is_not_done(nursery: Nursery) -> None:
    for name in load_lab(COURSE).exercises:
        verdict = check(nursery, name, stub(name))
        assert (verdict.state, verdict.points, verdict.rows) == ("todo", 0, ())
        assert repr(verdict).startswith(f"○ {name}   not done yet")


def test_a_stubs_line_that_is_left_below_an_answer_is_shown(nursery: Nursery) -> None:
    line = "raise NotImplementedError('your code here')"
    verdict = check(nursery, "double", f'def double(x):\n    "Twice x."\n    y = 2 * x\n    {line}\n    return y')
    assert (verdict.state, verdict.note) == ("todo", f"line 4 is still `{line}`")
    verdict = check(nursery, "double", f'def double(x):\n    "Twice x."\n    {line}')
    assert (verdict.state, verdict.note) == ("todo", "")


def test_a_cell_that_was_not_run_is_not_done(nursery: Nursery) -> None:
    verdict = judge(nursery, COURSE, "bubble", {})
    assert verdict.state == "todo" and "%%exercise bubble" in repr(verdict)


def test_an_exercise_that_uses_an_open_one_waits_for_it(nursery: Nursery) -> None:
    source = "from exercises.bubble import bubble\ndef double(x):\n    return x + x * (bubble(2, 1) > 0)"
    verdict = check(nursery, "double", source, bubble=stub("bubble"))
    assert verdict.state == "todo" and verdict.note == "it waits for exercise bubble"
    assert check(nursery, "double", source, bubble="def bubble(p, m):\n    return 1").state == "passed"


def test_an_error_of_the_learners_that_is_no_stub_is_an_error(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "def bubble(p, m):\n    raise NotImplementedError('odd p')")
    assert verdict.state == "wrong" and "NotImplementedError: odd p (line 2" in verdict.note


# ------------------------------------------------------------------------------------------------- wrong answers


def test_a_wrong_value_is_shown_beside_the_right_one(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "def bubble(p, m):\n    return (p - 1) / m")
    assert (verdict.state, verdict.points, verdict.idea) == ("wrong", 0, "Which part of the whole is idle?")
    assert notes(verdict)[0] == "got 0.375, expected 0.272727"
    verdict = check(nursery, "ring_all_reduce", RING.replace("return total", "return total / world"))
    assert notes(verdict)[0] == "rank 0: got tensor([2.0, 3.0]), expected tensor([4.0, 6.0])"


def test_a_message_that_nobody_waits_for_is_named_before_the_numbers(nursery: Nursery) -> None:
    wrong = """
import torch.distributed as dist
def ring_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total, async_op=True)
    return total
"""
    assert notes(check(nursery, "ring_all_reduce", wrong))[0].startswith("rank 0 never waits for its all_reduce")


def test_a_cell_is_imported_where_there_is_no_process_group_yet(nursery: Nursery) -> None:
    """As in the scripts that import it before they begin; afterwards the group is there."""
    early = "import torch.distributed as dist\nGROUP = dist.new_group([0, 1])\n"
    assert "no process group yet" in notes(check(nursery, "ring_all_reduce", early + RING))[0]
    late = "import torch.distributed as dist\nNONE = dist.is_initialized()\n"
    asked = RING.replace("    rank, world", "    assert dist.is_initialized() and not NONE\n    rank, world")
    assert check(nursery, "ring_all_reduce", late + asked).passed


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def bubbles(p, m):\n    return 0", "the cell defines `bubbles`, not `bubble`"),
        ("BUBBLE = 3", "the cell defines nothing, not `bubble`"),
        ("def bubble(ranks, m):\n    return 0", "the check calls by name: keep the names of the parameters"),
    ],
)
def test_what_a_cell_should_have_defined_is_told(nursery: Nursery, source: str, words: str) -> None:
    verdict = check(nursery, "bubble", source)
    assert words in notes(verdict)[0] and verdict.tried == ("parameters" in words)


def test_an_error_may_name_its_mistake(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "def bubble(p, m):\n    return 1 / 0")
    assert notes(verdict)[0].startswith("ZeroDivisionError") or verdict.note.startswith("ZeroDivisionError")
    assert verdict.mistake == "A pipeline is never empty."
    verdict = check(nursery, "bubble", "def bubble(p, m):\n    return [p][2]")
    assert verdict.mistake == "Four stages are as good as any.", "the words of the first case that fails, in all"
    hidden = "def bubble(p, m):\n    return 3 / 11 if (p, m) == (4, 8) else [p][2]"
    assert check(nursery, "bubble", hidden).mistake == "Any number of stages will do."
    late = "def bubble(p, m):\n    return 1.5 if (p, m) == (4, 8) else [p][2]"
    assert check(nursery, "bubble", late).mistake == "", "the first case fails of something else"


def test_another_mistake_gets_the_idea_and_partial_credit(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "def bubble(p, m):\n    return 3 / 11 * ((p, m) == (4, 8))")
    assert (verdict.points, verdict.of) == (2, 5)
    assert (verdict.mistake, verdict.idea) == ("", "Which part of the whole is idle?")
    assert "hidden" in notes(verdict)[1]
    assert repr(verdict).splitlines()[:2] == [
        "✘ bubble   not right yet      2/5",
        "  ✔ 4 stages, 8 microbatches  2/2",
    ]


def test_hidden_cases_show_neither_inputs_nor_answers(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "def bubble(p, m):\n    return 1234.5")
    assert not any(character.isdigit() for character in notes(verdict)[1])


def test_hidden_inputs_are_new_each_time_unless_seeded(nursery: Nursery) -> None:
    seen = 'def bubble(p, m):\n    raise ValueError(f"{p} {m}")'
    runs = [judge(nursery, COURSE, "bubble", {"bubble": seen}, seed=seed) for seed in (1, 1, None, None)]
    inputs = [notes(run)[1] for run in runs]
    assert inputs[0] == inputs[1] and len(set(inputs)) == 3
    assert len({notes(run)[0] for run in runs}) == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def bubble(p, m):\n    return p +", "SyntaxError: invalid syntax (line 2: return p +)"),
        (
            "def bubble(p, m):\n    return torch.ones(1)",
            "NameError: name 'torch' is not defined: the cell of an exercise sees only what it "
            "imports or defines itself (line 2: return torch",
        ),
        ("def bubble(p, m):\n    return {1, 2}", "DataError: answer is a set, which a check cannot read"),
        ("def bubble(p, m):\n    import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_what_stops_the_code_is_one_line(nursery: Nursery, source: str, says: str) -> None:
    verdict = check(nursery, "bubble", source)
    assert verdict.state == "wrong" and verdict.points == 0
    said = verdict.note or notes(verdict)[0]
    assert said.startswith(says) and "\n" not in said and "/tmp" not in said
    assert verdict.mistake == "" and verdict.tried == (not says.startswith("SyntaxError"))


LONGER = """
import torch
import torch.distributed as dist

def ring_all_reduce(x):
    n, r = dist.get_world_size(), dist.get_rank()
    sent = dist.isend(torch.ones(2 if r == 0 else 1), (r + 1) % n)
    y = torch.empty(1)
    dist.recv(y, (r - 1) % n)
    sent.wait()
    return x
"""


def test_a_rank_that_gloo_ends_is_named_before_those_that_lose_it(nursery: Nursery) -> None:
    said = notes(check(nursery, "ring_all_reduce", LONGER))[0]
    assert said.startswith("rank 1: no answer: the process was killed by SIGABRT; gloo ends a rank so"), said


def test_of_a_rank_that_waits_outside_of_the_cell_the_call_is_said() -> None:
    """As in a backward pass that the check calls: the cell's function has returned."""
    stack = [("a/torch/distributed/distributed_c10d.py", 9, "all_reduce"), ("b/f.py", 2, "backward")]
    behind = [
        ("a/comm/async_ops.py", 3, "wait"),
        ("a/comm/collectives.py", 4, "all_gather"),
        ("a/collectives.py", 5, "x"),
    ]
    inside = Reply(ended="stuck", stack=(Frame("/cell/exercises/f.py", 2, "f"),))
    outside = Reply(ended="stuck", stack=tuple(Frame(*frame) for frame in stack))
    passes = [*behind, ("t/autograd/graph.py", 6, "_engine_run_backward")]
    backward = Reply(ended="stuck", stack=tuple(Frame(*frame) for frame in passes))
    replies = [inside, outside, Reply(), Reply(ended="stuck"), backward]
    said = _waiting(replies, "f", "def f():\n    wait()").split("; ")[1:]
    assert said[:2] == ["rank 0: line 2: wait()", "rank 1: in all_reduce, outside of this cell"]
    assert said[2:] == [
        "rank 2: has returned",
        "rank 3: does not answer",
        "rank 4: in all_gather, in the backward pass",
    ]
    elsewhere = Reply(ended="late", stack=(Frame("t/threading.py", 3, "wait"),))
    said = [_waiting([one], "f", "def f():\n    wait()") for one in (inside, outside, elsewhere, Reply(ended="stuck"))]
    assert said == [
        "; stuck at line 2: wait()",
        "; stuck in all_reduce, outside of this cell",
        "; stuck outside of this cell",
        "; it does not answer",
    ]


def test_of_gloos_errors_what_is_the_same_in_each_run_is_said() -> None:
    texts = [f"[a/b/pair.cc:5] Read error [127.0.0.1]:{port}: Gone. This is typically caused by x" for port in (1, 22)]
    assert [player._error(RuntimeError(text), "f")["error"] for text in texts] == ["RuntimeError: Read error: Gone"] * 2
    texts = [f"[rank0]:[F1129 21:5{n}:20.781104146 Group.cpp:1537] Check failed: a == b (10 vs. 2)." for n in (7, 8)]
    texts += ["[enforce fail at /x/gloo/alltoall.cc:30] Check failed: a == b (10 vs. 2)."]
    said = {player._error(RuntimeError(text), "f")["error"] for text in texts}
    assert said == {"RuntimeError: Check failed: a == b (10 vs. 2)."}


def test_nothing_is_tried_after_a_late_answer(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "import time\ndef bubble(p, m):\n    time.sleep(60)")
    assert notes(verdict) == ["no answer within 2 s; stuck at line 3: time.sleep(60)", "not tried after that"]
    assert (verdict.state, verdict.points, verdict.mistake) == ("wrong", 0, "")


HANGS = {
    "dist.recv(x, 1 - dist.get_rank())": "every rank: line 5: dist.recv(x, 1 - dist.get_rank())",
    "dist.recv(x, 1) if dist.get_rank() == 0 else dist.barrier()": (
        "every rank: line 5: dist.recv(x, 1) if dist.get_rank() == 0 else dist.barrier()"
    ),
    "dist.get_rank() or dist.recv(x, 1)": "rank 0: line 5: dist.get_rank() or dist.recv(x, 1); rank 1: has returned",
    "dist.irecv(x + 1, 1) if dist.get_rank() == 0 else dist.recv(x, 0)": (
        "rank 0: has returned, and never waited for its recv; "
        "rank 1: line 5: dist.irecv(x + 1, 1) if dist.get_rank() == 0 else dist.recv(x, 0)"
    ),
}


@pytest.mark.parametrize("line", mostly_thorough(HANGS, [0, 2, 3]))
def test_a_hang_says_where_each_rank_waits(nursery: Nursery, line: str) -> None:
    source = (
        "import torch, torch.distributed as dist\ndef ring_all_reduce(x):\n    if x.numel() > 2:\n        return x\n"
        f"    {line}\n    return x"
    )
    said = notes(check(nursery, "ring_all_reduce", source))
    assert said[0] == f"deadlock: nothing goes on any more; {HANGS[line]}"
    assert "deadlock" not in " ".join(said[1:]), "the other cases are tried"


def test_the_rank_that_failed_is_named_not_those_that_lost_it(nursery: Nursery) -> None:
    source = RING.replace("    total,", "    if rank == 1:\n        raise ValueError('mine')\n    total,")
    verdict = check(nursery, "ring_all_reduce", source)
    assert verdict.note == "rank 1: ValueError: mine (line 8: raise ValueError('mine'))"
    killed = RING.replace("    total,", "    if rank == 1:\n        import os\n        os.abort()\n    total,")
    verdict = check(nursery, "ring_all_reduce", killed)
    assert verdict.note.startswith("rank 1: no answer: the process was killed by SIGABRT; gloo ends a rank so")


def test_evidence_decides_where_values_cannot(nursery: Nursery) -> None:
    source = (
        "import torch.distributed as dist\ndef ring_all_reduce(x):\n    y = x.contiguous().clone()\n"
        "    dist.all_reduce(y)\n    return y"
    )
    verdict = check(nursery, "ring_all_reduce", source)
    assert [row.points for row in verdict.rows] == [1, 3, 0, 1]
    assert notes(verdict)[2] == "it calls all_reduce; allowed here: send, recv" and verdict.mistake == ""
    again = (
        "\n        again = dist.isend(total.clone(), (rank + 1) % world)"
        "\n        dist.recv(arriving.clone(), (rank - 1) % world)"
    )
    wasteful = RING.replace("        total += arriving", f"        total += arriving{again}\n        again.wait()")
    verdict = check(nursery, "ring_all_reduce", wasteful)
    assert [row.points for row in verdict.rows] == [1, 3, 1, 0] and "(N-1) n" in notes(verdict)[3]
    assert verdict.mistake == "Something travels more than once.", "the words of the only case that fails"


def test_the_inputs_of_the_judge_cannot_be_changed(nursery: Nursery) -> None:
    """An answer computed in place is judged against untouched inputs."""
    verdict = check(nursery, "ring_all_reduce", "def ring_all_reduce(x):\n    x.zero_()\n    return x")
    assert verdict.points == 0


def formats(rank: int, world: int, job: None) -> list[str]:
    import sys

    return sorted({"jupytext", "nbformat", "jsonschema"} & set(sys.modules))


def test_a_process_that_decides_imports_nothing_large(nursery: Nursery) -> None:
    """It has what this file imports. Jupyter's formats would cost each check two seconds."""
    assert nursery.call(formats, [None], Limits())[0].value == []


# -------------------------------------------------------------------------------------------------------- cheats


# One of each kind: what an answer is, what is printed, what is patched, what is looked for, read and reached.
ORDINARY = (
    *("equals everything", "prints the verdict", "patches the judge", "looks for the answer in frames"),
    *("reads the checks", "a socket"),
)


@pytest.mark.parametrize("name", mostly_thorough(CHEATS, lambda name: name in ORDINARY))
def test_cheats_score_nothing(nursery: Nursery, name: str) -> None:
    verdict = check(nursery, "bubble", CHEATS[name])
    assert (verdict.state, verdict.points) == ("wrong", 0), repr(verdict)
    assert check(nursery, "bubble", "def bubble(p, m):\n    return (p - 1) / (m + p - 1)").points == 5


def test_what_is_shown_can_be_learnt_by_heart_what_is_hidden_cannot(nursery: Nursery) -> None:
    verdict = check(nursery, "bubble", "def bubble(p, m): return {(4, 8): 3 / 11}.get((p, m), 0.0)")
    assert [row.points for row in verdict.rows] == [2, 0]


def test_nobody_else_can_be_killed(nursery: Nursery) -> None:
    """Neither the process that starts ranks, nor the notebook or the grader that waits for it."""
    for target in ("os.getppid()", "-1"):
        source = f"import os\ndef bubble(p, m):\n    os.kill({target}, 9)\n    return (p - 1) / (m + p - 1)"
        verdict = check(nursery, "bubble", source)
        assert (verdict.state, verdict.points) == ("wrong", 0) and "signals to others" in verdict.note


def test_a_server_that_dies_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    with Nursery() as mine:
        server = mine.warm_up()
        server.process.kill()
        server.process.wait(10)
        monkeypatch.setattr(mine, "warm_up", lambda: server)  # it died after it had been looked at
        with pytest.raises(RankError, match="the process that starts ranks ended"):
            check(mine, "bubble", "def bubble(p, m):\n    return (p - 1) / (m + p - 1)")


# ------------------------------------------------------------------------------------------- faults of the author


def test_unknown_names_are_refused_with_the_nearest(nursery: Nursery) -> None:
    with pytest.raises(ConfigError, match="did you mean `bubble`"):
        judge(nursery, COURSE, "buble", {})
    with pytest.raises(ConfigError, match="there is no lab"):
        judge(nursery, "tests.labkit.no_course", "bubble", {})


def test_a_failing_reference_is_the_courses_fault(nursery: Nursery) -> None:
    with pytest.raises(CourseError, match="ZeroDivisionError"):
        judge(nursery, "tests.labkit.broken_course", "fails", {"fails": "def fails():\n    return 1"})
