"""Answers of every form: a right one passes in any, a wrong one is told why, and the check itself never fails."""

from __future__ import annotations

import pytest

from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.verdict import Verdict

pytestmark = pytest.mark.thorough

COURSE = "tests.labkit.mini_course"

RIGHT = {
    "a fraction": "from fractions import Fraction\ndef bubble(p, m): return Fraction(p - 1, m + p - 1)",
    "a decimal": "from decimal import Decimal\ndef bubble(p, m): return Decimal(p - 1) / (m + p - 1)",
    "NumPy's double": "import numpy\ndef bubble(p, m): return numpy.float64(p - 1) / (m + p - 1)",
    "NumPy's long double": "import numpy\ndef bubble(p, m): return numpy.longdouble(p - 1) / (m + p - 1)",
    "NumPy's array of no dimensions": "import numpy\ndef bubble(p, m): return numpy.array((p - 1) / (m + p - 1))",
    "a tensor of no dimensions": "import torch\ndef bubble(p, m): return torch.tensor((p - 1) / (m + p - 1))",
    "a parameter": "import torch\ndef bubble(p, m): return torch.nn.Parameter(torch.tensor((p - 1) / (m + p - 1)))",
    "a float of one's own": "class Mine(float): pass\ndef bubble(p, m): return Mine((p - 1) / (m + p - 1))",
}
WRONG = {
    "an integer beyond a float": ("return 10**400", "got an integer of about 401 digits, expected 0.272727"),
    "a negative one": ("return -10**400", "got an integer of about 401 digits, expected 0.272727"),
    "an integer beyond JSON": ("return 10**10_000", "answer is an integer of more than 13,000 bits"),
    "NaN": ("return float('nan')", "got nan, expected 0.272727"),
    "infinity": ("return float('-inf')", "got -inf, expected 0.272727"),
    "a huge fraction": (
        "from fractions import Fraction; return Fraction(10**400, 3)", "answer is a Fraction, which a check cannot read"
    ),
    "a complex number": ("return 1j", "answer is a complex, which a check cannot read: return numbers"),
    "a set": ("return {1}", "answer is a set, which a check cannot read: return a list, not a set"),
    "an object": ("return object()", "answer is a object, which a check cannot read: return numbers"),
    "a list that holds itself": ("a = []; a += [a, a, a, a]; return a", "lists inside lists, more than 32 deep"),
    "a dict that holds itself": ("a = {}; a[1] = a[2] = a; return a", "lists inside lists, more than 32 deep"),
    "a deep list": ("a = []\n    for _ in range(10**5): a = [a]\n    return a", "lists inside lists, more than 32"),
    "as deep as may be": ("a = 1\n    for _ in range(31): a = {1: a}\n    return a", "got {1: {1: {1:"),
    "one list a thousand times": ("return [[[0] * 100] * 100] * 100", "the answer holds more than 200,000 values"),
    "a wide list": ("return [0] * 50_000", "got a list of 50000, expected 0.272727"),
    "an iterator without end": ("import itertools; return itertools.count()", "of more than 100,000 items"),
    "an iterator that raises": ("return (1 / 0 for _ in 'a')", "ZeroDivisionError: division by zero (line 2"),
    "a long text": ("return 'x' * 1_000_000", "got 'xxxx"),
    "an escape sequence": ("return '\\x1b[2J'", "got '\\x1b[2J', expected 0.272727"),
    "half a surrogate": ("return '\\ud800'", "got '\\ud800', expected 0.272727"),
    "a text that is the number": ("return str((p - 1) / (m + p - 1))", "got '0.2727272727272727', expected 0.272727"),
    "an exception of escapes": ("raise ValueError('\\x1b[2J\\n\\x07')", "ValueError: \\x1b[2J"),
    "an exception without a text": ("raise ValueError('\\n' * 10**6)", "ValueError"),
    "a tensor of NaN": ("import torch; return torch.full((3, 3), float('nan'))", "got a tensor [3, 3] of float32"),
    "a tensor on no device": ("import torch; return torch.ones(1, device='meta')", "on the meta device"),
    "a tensor without end": ("import torch; return torch.ones(1).expand(1 << 40)", "is a tensor of 4194304 MiB"),
    "rows of no numbers": ("import torch; return torch.empty(10**9, 0)", "is a tensor of the shape [1000000000, 0]"),
    "dims without end": ("import torch; return torch.ones([1] * 5000)", "is a tensor of the shape [1, 1, 1,"),
    "a dict of odd keys": ("return {None: 1, (1, 2): 2, 1.5: 3}", "got {None: 1, [1, 2]: 2, 1.5: 3}, expected"),
    "keys of one hash": ("return {i * (2**61 - 1): 0 for i in range(9)}", "a dict with a key beyond 2**60"),
}  # fmt: skip


def said(nursery: Nursery, source: str) -> Verdict:
    return judge(nursery, COURSE, "bubble", {"bubble": source}, "seed")


@pytest.mark.parametrize("form", RIGHT)
def test_right_in_another_form(nursery: Nursery, form: str) -> None:
    verdict = said(nursery, RIGHT[form])
    assert verdict.state == "passed" and verdict.points == 5, verdict


@pytest.mark.parametrize("form", WRONG)
def test_wrong_is_told_why_and_the_check_itself_does_not_fail(nursery: Nursery, form: str) -> None:
    body, says = WRONG[form]
    verdict = said(nursery, f"def bubble(p, m):\n    {body}\n")
    assert verdict.state == "wrong" and verdict.points == 0 and says in verdict.rows[0].note, verdict
    assert verdict.rows[0].note.isprintable() and len(verdict.rows[0].note) < 400


FORGED = {
    "a reason that is a tensor": "import torch\nfrom labkit import player\n"
    'player._error = lambda *_: {"error": torch.ones(2)}\ndef bubble(p, m): raise ValueError',
    "a truth that is two": "import torch\nfrom labkit import player\n"
    'player._error = lambda *_: {"error": "no", "peer": torch.ones(2)}\ndef bubble(p, m): raise ValueError',
    "evidence of tensors": "import torch\nfrom labkit.evidence import Evidence\nreal = Evidence.to_plain\n"
    "Evidence.to_plain = lambda self: "
    '{**real(self), "order": [["matmul", torch.ones(2)]] * 2, "places": [torch.ones(2)] * 2}\n'
    "def bubble(p, m): return (p - 1) / (m + p - 1)",
    "an answer of rows without numbers": "import base64, os\n"
    """def bubble(p, m):
    text = '{"dict": [["trials", [{"dict": [["value", {"tensor": ["float32", [1000000000, 0], ""]}]]}]]]}'
    for fd in range(3, 64):
        try: os.write(fd, text.encode() + bytes([10]))
        except OSError: pass
    os._exit(0)""",
}


@pytest.mark.parametrize("form", FORGED)
def test_what_a_process_says_in_the_place_of_the_player_is_a_wrong_answer(nursery: Nursery, form: str) -> None:
    verdict = said(nursery, FORGED[form])
    assert verdict.state == "wrong" and verdict.points == 0, verdict
