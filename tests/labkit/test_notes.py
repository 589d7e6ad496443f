"""Notes in the language of the labs: the phrases of `WORDS` are those that the judge really writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from labkit.checks import every_wait_follows, sends, untouched
from labkit.compare import difference
from labkit.evidence import Call, Evidence
from labkit.exercises import Answer
from labkit.notes import in_words, sentences, translated_sentences, with_sentences
from labkit.parts import wrong_parts
from labkit.said import WORDS
from labkit.settings import Setting
from minimegatron.commands import prose
from minimegatron.commands.my_labs import SAID_IN

ROOT = Path(__file__).parent.parent.parent
HIDDEN = WORDS["note-hidden"]
ENGLISH = (
    r"\b(?:got|expected|wrong|differ|stay|hidden|holds|its?|other|with|every|missing|more|calls|never|sends|also)\b"
)


def compared() -> list[str]:
    big = torch.zeros(12)
    apart = [
        (224, 112.0), ([1, 2], [1, 3]), ({"a": 1, "b": 2}, {"a": 2, "b": 2}), ({"a": 1}, {"b": 1}), (big + 1, big),
        (torch.zeros(2), torch.zeros(3)), (torch.zeros(2).half(), torch.zeros(2)), (list(range(99)), list(range(98))),
        (["ab" * 20, "b", "d"], ["ab" * 20, "c", "d"]),
    ]  # fmt: skip
    want = {"dq": big, "dk": big, "dv": big, "lse": [1, 2], "o": {"p": 1}, "m": big, "l": big, "n": 1}
    got = {"dq": big[:3], "dk": big * torch.nan, "dv": None, "lse": [1], "o": 3, "m": 3, "l": big + 1, "n": 2}
    parts = [(got, want), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ({"b": 1, "c": 1}, {"b": 1}), (1, 2)]
    return [str(difference(*pair)) for pair in apart] + [f"{wrong_parts(*pair)}{HIDDEN}" for pair in parts]


def judged() -> list[str]:
    call = Call("send", 8, 0, 3)
    answer = Answer(None, [{}, {}], [Evidence((call,)), Evidence()])
    judges = (sends(), sends("recv"), sends("send", to_the_next=True), sends("send", times=2), every_wait_follows)
    said = [judge(answer) for judge in judges]
    overwritten = Answer(None, [{}], [Evidence((Call("send", 8, 0, 3, overwritten=True),))])
    return [sentence for sentence in (*said, untouched(overwritten)) if sentence]


def written() -> list[str]:
    """Notes as the judge's own functions write them, and with what `deciding` and `playing` put before."""
    before = [*(Setting(**{way: True}).said for way in ("strided", "double", "smaller")), "with n=3, tp=2"]
    return [
        *compared(), *judged(), *(f"{setting}: every rank: {note}" for setting in before for note in compared()[:2]),
        *(f"{who}: {note}" for who in ("rank 0", "ranks 0 to 2") for note in compared()),
        "it changes its input `x`: compute on a copy",
        "rank 0: has returned",
        "rank 0 never waits for its send: what it brings may not be there when it is used",
    ]  # fmt: skip


def test_in_english_a_note_is_unchanged() -> None:
    assert len(written()) > 50
    for note in written():
        assert in_words(note) == note


def test_in_chinese_only_names_and_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    for note in written():
        assert not re.findall(ENGLISH, in_words(note)), (note, in_words(note))
    assert (
        in_words(f"rank 0: dq is wrong (its shape){HIDDEN}") == "rank 0：dq 不对（形状）；这个用例的输入和答案保持隐藏"
    )
    assert in_words("at [0, 1]: got 1.0, expected 4.0 (12 of 16 differ)") == (
        "位置 [0, 1]：得到 1.0，应为：4.0（16 个中有 12 个不同）"
    )


@pytest.mark.parametrize(
    "note",
    [
        "ValueError: got 3, expected 4 (line 2: raise)",
        "out is wrong: it is o, which is still to be divided by l",
        "RuntimeError: rank 0: it is no dict, and 3 more",
        "some other sentence of a lab's judge",
    ],
)
def test_errors_and_a_labs_own_judges_are_shown_as_they_are(note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    assert in_words(note) == note


def test_a_note_of_names_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    assert in_words("out is wrong, lse is wrong (its shape)") == "out 不对, lse 不对（形状）"


def test_values_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    assert in_words("got 'a is wrong', expected 'rank 0: b'") == "得到 'a is wrong'，应为：'rank 0: b'"


SUMS = '''"""What is wrong with sums: a module."""
def judge(answer):
    """Say what is wrong with an answer."""
    if answer.sums:
        return f"rank {answer.rank} sums {len(answer.sums)} times; {'more' if answer.few else 'one'} is enough"
    worst = f"rank {answer.rank} dies at its change {answer.change}"
    return f"{worst}: at the end {answer.what} is still there"
NAMES = ["a list that is no sentence of a function"]
CASE = Case("some words of a case", accept=[most(3, "all of its weights")])
'''
FOUND = {
    "rank {a} sums {b} times; {c} is enough": "rank {a} 求和了 {b} 次；{c}就够",
    "more": "更多",
    "one": "一次",
    "rank {a} dies at its change {b}": "rank {a} 在第 {b} 个改动处死掉",
    "{worst}: at the end {a} is still there": "{worst}：最后 {a} 还在",
    "all of its weights": "它的所有权重",
}


def test_sentences_of_a_labs_judges_are_found_in_their_source() -> None:
    assert sentences(SUMS) == list(FOUND)
    more = SUMS.replace("    worst =", "    if answer.late:\n        return 'it waits before it sends'\n    worst =")
    assert set(sentences(more)) - set(FOUND) == {"it waits before it sends"}, "a new one is to be translated"


@pytest.mark.parametrize(
    ("note", "told"),
    [
        ("rank 0 sums 12 times; one is enough", "rank 0 求和了 12 次；一次就够"),
        ("2 ranks: rank 0 sums 3 times; more is enough", "2 ranks: rank 0 求和了 3 次；更多就够"),
        ("rank 1 dies at its change 3: at the end x is still there", "rank 1 在第 3 个改动处死掉：最后 x 还在"),
        ("ValueError: rank 0 sums 12 times; one is enough", "ValueError: rank 0 sums 12 times; one is enough"),
        ("rank 1: ValueError: all of its weights", "rank 1: ValueError: all of its weights"),
        ("one", "one"),
        ("the rank 7 sums", "the rank 7 sums"),
    ],
    ids=["a sentence", "within a note", "two sentences", "an error", "an error of a rank", "a word", "not a sentence"],
)
def test_sentences_are_told_in_another_language(note: str, told: str) -> None:
    assert with_sentences(note, FOUND) == told


def test_a_value_after_a_sentence_is_not_part_of_it() -> None:
    said = {"weights after step {step}": "第 {step} 步之后的权重"}
    got = "weights after step 1: got 2, expected 3; weights after step 2 is wrong"
    assert with_sentences(got, said) == "第 1 步之后的权重: got 2, expected 3; 第 2 步之后的权重 is wrong"


CHECKS = '''
"""Of a module: no sentence."""
WORDS = "a text that nobody is told"

def judge(answer):
    """Of a function: no sentence, either."""
    said = f"rank {answer.rank} sends {answer.n + 1} parts{_much(answer.n)}; {answer} are enough"
    return said if answer else "forward"

def _much(n):
    return f", a fifth of them twice, as {'often' if n else 'rarely'} as that"

CASE = Case("the name of a case", 1, accept=[most_bytes("the inputs and the output", lambda i: f"some more {i}")])
'''


def test_sentences_are_found_with_their_fields() -> None:
    assert sentences(CHECKS) == [
        "rank {a} sends {b} parts{c}; {answer} are enough", "forward", ", a fifth of them twice, as {a} as that",
        "often", "rarely", "the inputs and the output",
    ]  # fmt: skip


def test_a_sentence_is_told_with_those_in_its_fields() -> None:
    said = {
        "rank {rank} sends {n} parts{much}; {few} are enough": "<rank {rank}: {n}{much}, {few}>",
        ", as {how} as that": " ({how})",
        "often": "OFT",
        "rank {rank} waits for rank {other}": "<{rank} -> {other}>",
    }
    note = "rank 0: rank 1 sends 3 parts, as often as that; 2 are enough"
    assert with_sentences(note, said) == "rank 0: <rank 1: 3 (OFT), 2>", "no field holds the rank before"
    assert with_sentences("often", said) == "often", "a word alone is told only in a field"
    assert with_sentences("rank 0 waits for rank 1; the end", said) == "<0 -> 1>; the end"
    assert with_sentences(f"rank 0 waits for rank 1{HIDDEN}", said) == f"<0 -> 1>{HIDDEN}"
    assert with_sentences("another note", said) == "another note"


@pytest.mark.parametrize(
    ("lab", "note"),
    [
        ("03_pipeline_1f1b", "p=2, m=3: it takes 12 steps (F 1, whole backward 2); 11 are enough. For example, "
         "rank 1 waits from step 8 to 9 for the input of B2: rank 2, which sends it, does W0 first"),
        ("03_pipeline_1f1b", "rank 2 keeps 5 activations at a time; 1 is enough (it does 4 forwards before its first "
         "backward)"),
        ("06_data_parallel_zero", "rank 0 holds 84 bytes at once; room for its shards and one bucket is 80"),
        ("12_planning", "1 layout is too many; one of them has tp 2, and breaks a rule: tp is at most a node"),
        ("01_process_groups", "deadlock: nothing goes on any more; rank 0: has returned; rank 1: line 10: wait()"),
    ],
)  # fmt: skip
def test_a_note_of_a_lab_has_no_english_left(lab: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    folder = ROOT / "course" / lab
    told = in_words(with_sentences(note, translated_sentences(prose.read(folder / "zh.md"), folder)))
    assert not re.findall(r"[a-z]{2,} [a-z]{2,}", told), told
