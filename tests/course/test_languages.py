"""Every translation says what the English says, and nothing old is shown."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit import magics
from labkit.exercises import Case, Exercise, Lab
from labkit.languages import LISTS, forbidden, pages, problems, sections
from labkit.suspects import mistakes_of
from labkit.verdict import Row, Verdict
from labkit.workspace import Workspace
from minimegatron.commands.my_labs import SAID_IN
from minimegatron.commands.prose import Translation, Which, bulleted, mark, read, stamp

ROOT = Path(__file__).parents[2]
AVOID = forbidden((ROOT / "course/terms.zh.md").read_text(encoding="utf-8"))
LABS = [path.parent.name for path in sorted((ROOT / "course").glob("[0-9][0-9]_*/lab.py"))]
NAMES = [*LABS, "quiz", "said", "README", "reading_plan"]

ENGLISH = """## 2 · The ring

Each of `N` ranks sends $2 (N-1)/N$ of 1,024 numbers; see [the paper](https://arxiv.org/abs/1909.08053).

| step | sent |
|------|------|
| 1    | `x`  |

```text
0 -> 1 -> 2
```"""
CHINESE = """## 2 · 环

`N` 个 rank 各发送 1,024 个数的 $2 (N-1)/N$；见[论文](https://arxiv.org/abs/1909.08053)。

| 步 | 发送 |
|----|------|
| 1  | `x`  |

```text
0 -> 1 -> 2
```"""
WHICH = Which("cell", "the-ring")


@pytest.mark.parametrize("name", NAMES)
def test_every_piece_is_translated_and_up_to_date(name: str) -> None:
    [(_, english, path)] = pages(ROOT, "zh", [name])
    wrong = [f"{which.kind} {which.name} {problem}" for which, problem in problems(english, read(path), AVOID)]
    assert not wrong, f"python -m labkit.languages zh {name} --todo prints what is to be translated"


def found(english: str, said: str) -> list[str]:
    return [problem for _, problem in problems({WHICH: english}, {WHICH: Translation(stamp(english), said)}, AVOID)]


def test_a_true_translation_has_no_problem(tmp_path: Path) -> None:
    assert found(ENGLISH, CHINESE) == []
    file = tmp_path / "zh.md"
    file.write_text(f"{mark(WHICH, ENGLISH)}\n{CHINESE}\n", encoding="utf-8")
    assert read(file) == {WHICH: Translation(stamp(ENGLISH), CHINESE)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("1,024", "1,042"), "numbers: lacks 1,024; has also 1,042"),
        (lambda text: text.replace("`N`", "N"), "code: lacks N"),
        (lambda text: text.replace("(N-1)/N", "(N+1)/N"), "formulas: lacks $2 (N-1)/N$; has also $2 (N+1)/N$"),
        (lambda text: text.replace("08053", "08054"), "links: lacks https://arxiv.org/abs/1909.08053"),
        (lambda text: text + "\n\n- 还有", "items: has also -"),
        (lambda text: text + "{name}", "fields: has also name"),
        (lambda text: text.replace("## ", "# "), "headings: lacks ##; has also #"),
        (lambda text: text.replace("| 1  | `x`  |\n", ""), "columns of table rows: lacks 2"),
        (lambda text: text.replace("-> 2", "-> 3"), "code blocks: lacks"),
        (lambda text: text.replace("发送", "发送全归约"), "says 全归约, not all-reduce"),
    ],
)
def test_what_no_language_changes_is_compared(change: Callable[[str], str], said: str) -> None:
    assert any(said in problem for problem in found(ENGLISH, change(CHINESE))), found(ENGLISH, change(CHINESE))


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("- `p` 要减 1。\n- 除以 2。", []),
        ("- 除以 2。\n- `p` 要减 1。", ["line 1: code: lacks p", "line 2: numbers: lacks 2"]),
        ("- `p` 要减 1。\n- 除以\n  2。", ["has 3 lines, not 2"]),
        ("- `p` 要减 1，\n除以 2。", ["line 2: items: lacks -"]),
    ],
)
def test_a_list_is_compared_line_by_line(kind: str, said: str, told: list[str]) -> None:
    which, text = Which(kind, "ring"), "- `p` minus 1.\n- Divide by 2."
    wrong = [problem for _, problem in problems({which: text}, {which: Translation(stamp(text), said)}, {})]
    assert bool(wrong) == bool(told) and all(any(one in problem for problem in wrong) for one in told), wrong


def test_what_is_lacking_outdated_or_no_longer_there_is_named() -> None:
    there = Translation(stamp(ENGLISH), CHINESE)
    other = Which("cell", "another")
    assert list(problems({WHICH: ENGLISH}, {}, {})) == [(WHICH, "is not translated")]
    [(_, said)] = problems({WHICH: ENGLISH + " more"}, {WHICH: there}, {})
    assert said == "has changed since it was translated"
    assert list(problems({WHICH: ENGLISH}, {WHICH: there, other: there}, {})) == [(other, "is not in the English")]
    turned = list(problems({WHICH: ENGLISH, other: ENGLISH}, {other: there, WHICH: there}, {}))
    assert turned == [(other, "is at another place than in the English")]


def test_a_page_is_cut_at_its_headings_and_not_inside_of_code() -> None:
    page = "# One\n\ntext\n\n```bash\n# no heading\n```\n\n## Two words\nmore\n"
    assert list(sections(page)) == [Which("section", "one"), Which("section", "two-words")]
    assert "\n".join(sections(page).values()).replace("\n", "") == page.replace("\n", "")


def test_a_hint_is_in_the_language_of_the_labs_while_it_says_what_the_english_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = types.ModuleType("some_course")
    course.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "some_course", course)
    asked = magics.LabMagics.__new__(magics.LabMagics)
    asked._course = "some_course"
    hint = Which("hint", "ring")
    (tmp_path / "zh.md").write_text(f"{mark(hint, 'N - 1 times.')}\nN - 1 次。\n", encoding="utf-8")
    assert asked._said(hint, "N - 1 times.") == "N - 1 times."
    monkeypatch.setenv(SAID_IN, "zh")
    assert asked._said(hint, "N - 1 times.") == "N - 1 次。"
    assert asked._said(hint, "N times.") == "N times."
    assert asked._said(Which("idea", "ring"), "N - 1 times.") == "N - 1 times."


LAB = "# %%\n# %%exercise ring\ndef ring(n):\n    return n - 1\n\n# %%\n"
ANSWERS = 'WRONG = [Edit("n - 1", "n", mistake="One step too many."), Edit("n - 1", "0", mistake="No step.")]\n'
RING = Exercise("ring", [Case("four ranks", {"n": 4})], lambda n: n - 1, errors={"KeyError": "No such rank."})
MISTAKES = ["One step too many.", "No step.", "No such rank."]


@pytest.mark.parametrize(
    ("english", "chinese", "told"),
    [
        (
            MISTAKES,
            "- 多了一步。\n- 一步也没有。\n- 没有这个 rank。",
            ["多了一步。", "一步也没有。", "没有这个 rank。"],
        ),
        ([*MISTAKES[:2], "No rank."], "- 多了一步。\n- 一步也没有。\n- 没有这个 rank。", MISTAKES),
        (MISTAKES, "- 多了一步。\n- 没有这个 rank。", MISTAKES),
        (MISTAKES, None, MISTAKES),
    ],
    ids=["translated", "outdated", "a line is lacking", "not translated"],
)
def test_a_check_tells_the_mistake_in_the_language_of_the_labs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, english: list[str], chinese: str | None, told: list[str]
) -> None:
    course = types.ModuleType("some_course")
    course.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "some_course", course)
    monkeypatch.setenv(SAID_IN, "zh")
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "ring.py").write_text(f"from labkit.answers import Edit\n\n{ANSWERS}")
    (tmp_path / "lab.py").write_text(LAB)
    which, cases = Which("mistakes", "ring"), Which("cases", "ring")
    pieces = f"{mark(cases, '- four ranks')}\n- 四个 rank\n"
    pieces += f"{mark(which, bulleted(english))}\n{chinese}\n" if chinese else ""
    (tmp_path / "zh.md").write_text(pieces, encoding="utf-8")
    asked = magics.LabMagics.__new__(magics.LabMagics)
    asked._course, asked._lab = "some_course", Lab("00_ring", [RING])
    asked._workspace = Workspace("00_ring", tmp_path)
    for sentence, want in zip(MISTAKES, told, strict=True):
        verdict = Verdict("ring", "wrong", 1, (Row("four ranks", 0, 1, "got 4"),), mistake=sentence)
        monkeypatch.setattr(asked, "_check", lambda name, verdict=verdict: verdict)
        shown = asked.check("ring")
        assert isinstance(shown, Verdict) and (shown.rows[0].what, shown.mistake) == ("四个 rank", want)
    assert mistakes_of("some_course", RING) == MISTAKES, "what is to be translated is what can be told"
