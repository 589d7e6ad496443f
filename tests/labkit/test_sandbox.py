"""What a submission can do to the machine when it asks Python: nothing; `test_thefts` asks the kernel."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from labkit import sandbox
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.verdict import Verdict

COURSE = "tests.labkit.mini_course"


def check(nursery: Nursery, body: str) -> Verdict:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"import os\ndef bubble(p, m):\n{lines}    return (p - 1) / (m + p - 1)"
    return judge(nursery, COURSE, "bubble", {"bubble": source})


ASKS_PYTHON = {
    "os.fork()": "processes",
    "__import__('subprocess').run(['true'])": "processes",
    "os.system('true')": "processes",
    "os.execv('/bin/true', ['true'])": "processes",
    "__import__('multiprocessing').get_context('fork').Process(target=print).start()": "processes",
    "os.kill(os.getppid(), 15)": "signals to others",
    "os.killpg(0, 15)": "signals to others",
    "__import__('socket').socket()": "the network",
    "__import__('socket').getaddrinfo('localhost', 1)": "the network",
    "__import__('resource').setrlimit(9, (-1, -1))": "its own limits",
    "open('../beside', 'w')": "its own folder only",
    "os.remove(os.__file__)": "its own folder only",
    "__import__('pathlib').Path(os.__file__).unlink()": "its own folder only",
    "open('mine', 'w').close()\nos.rename('mine', '../beside')": "its own folder only",
    "__import__('shutil').rmtree(os.path.dirname(os.__file__))": "its own folder only",
}


@pytest.mark.parametrize("line", ASKS_PYTHON)
def test_python_refuses_and_says_why(nursery: Nursery, line: str) -> None:
    verdict = check(nursery, line)
    assert verdict.points == 0 and ASKS_PYTHON[line] in verdict.note, repr(verdict)


LAB = "course.01_process_groups"


@pytest.mark.parametrize(
    "module",
    [
        "tests.labkit.mini_course",
        f"{LAB}.checks.predicted",
        f"{LAB}.answers.bytes_sent",
    ],
)
def test_the_checks_cannot_be_read(nursery: Nursery, module: str) -> None:
    verdict = check(nursery, f"import importlib; importlib.import_module('{module}')")
    assert verdict.points == 0 and ("ModuleNotFoundError" in verdict.note or "may not read" in verdict.note)


def test_threads_files_of_its_own_and_imports_are_allowed(nursery: Nursery) -> None:
    body = (
        "import threading, tempfile, numpy.random, torch.nn, minimegatron.layers.norm\n"
        "thread = threading.Thread(target=print)\nthread.start()\nthread.join()\n"
        "with tempfile.TemporaryFile() as file:\n    file.write(b'x')\n"
        "open('mine', 'w').write('x')\nos.remove('mine')\nos.kill(os.getpid(), 0)"
    )
    assert check(nursery, body).state == "passed"


@pytest.mark.thorough
def test_every_dtype_can_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # torch of its own, which has converted nothing before
    with Nursery() as nursery:
        assert check(nursery, "import torch\ntorch.ones(64).to(torch.float16).to(torch.bfloat16)").state == "passed"


@pytest.mark.parametrize("checkout", [False, True])
def test_packages_beside_an_installed_labkit_are_given_and_of_a_checkout_nothing(
    checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed into a folder that a `.pth` file names, labkit stands beside torch, and beside the checks."""
    if checkout:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(sandbox, "_ROOT", tmp_path)
    monkeypatch.setattr(sandbox, "HIDDEN", (tmp_path / "course",))
    for name in ("beside", "course"):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / name / "__init__.py")
        monkeypatch.setitem(sys.modules, f"a_test_of_{name}", module)
    found = [folder for folder in sandbox._elsewhere([]) if folder.startswith(f"{tmp_path}/")]
    assert found == [] if checkout else found == [str(tmp_path / "beside")]
