"""Ready-made judges of evidence: a sentence with numbers, or None."""

from __future__ import annotations

from labkit.checks import at_most, no_tensor_above, sends
from labkit.evidence import Call, Evidence
from labkit.exercises import Answer


def test_judges_of_evidence() -> None:
    calls = (Call("send", 100, 1, 3), Call("recv", 100, 1, 3), Call("all_reduce", 8, -1, 5))
    answer = Answer(0, {"n": 50}, [Evidence(calls[:2], (), 9, 4096), Evidence(calls, (), 9, 64)])
    assert sends("send", "recv", "all_reduce")(answer) is None
    assert sends("send", "recv")(answer) == "it calls all_reduce; allowed here: send, recv"
    assert sends()(answer) == "it calls recv, send; allowed here: no communication"
    every = ("send", "recv", "all_reduce")
    assert sends(*every, times=1)(Answer(0, {}, answer.evidence[:1])) is None
    assert sends(*every, times=1)(answer) == "rank 1 calls send or all_reduce 2 times, expected 1"
    assert sends(*every, at_most=("n", lambda inputs: inputs["n"]))(answer) == "rank 0 moves 100 bytes; n is 50"
    assert at_most("2n", lambda inputs: 2 * inputs["n"], "send")(answer) is None
    assert at_most("n", lambda inputs: inputs["n"], "send")(answer) == "rank 0 moves 100 bytes; n is 50"
    in_a_ring = sends("send", "recv", to_the_next=True)
    assert in_a_ring(Answer(0, {}, [answer.evidence[0]] * 2)) == (
        "rank 1 sends to rank 1; in this ring it sends to the next rank only, 0"
    )
    assert in_a_ring(Answer(0, {}, [answer.evidence[0], Evidence((), (), 9, 64)])) is None
    assert no_tensor_above("4 KiB", lambda _: 4096)(answer) is None
    assert no_tensor_above("1 KiB", lambda _: 1024)(answer) == "its largest tensor has 4096 bytes; 1 KiB is 1024"
