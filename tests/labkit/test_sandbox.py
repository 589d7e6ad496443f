"""What a submission can do to the machine: nothing, whether it asks Python or the kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit import sandbox
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.verdict import Verdict

COURSE = "tests.labkit.mini_course"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part exists on Linux only")
LIBC = "import ctypes\nlibc = ctypes.CDLL(None)\n"


def check(nursery: Nursery, body: str, before: str = "import os") -> Verdict:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"{before}\ndef bubble(p, m):\n{lines}    return (p - 1) / (m + p - 1)"
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


# Past the audit hook. Each must fail (a negative answer), and then the right answer is given: so it passes.
ASKS_THE_KERNEL = {
    "fork": "libc.fork()",
    "clone": "libc.syscall({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 17, 0, 0, 0, 0)",
    "kill": "libc.kill(-1, 0)",
    "kill the parent": "libc.kill(os.getppid(), 0)",
    "remove": "libc.unlink(target.encode())",
    "write": "libc.creat(target.encode() + b'.new', 0o600)",
    "socket": "libc.socket(2, 1, 0)",
    "own session": "libc.setsid()",
    "unmount": "libc.umount2(course.encode(), 2)",
    "other namespaces": "libc.unshare(0x20000)",
    "more memory": "libc.setrlimit(9, ctypes.create_string_buffer(bytes([255] * 16), 16))",
}


@LINUX
@pytest.mark.parametrize("name", ASKS_THE_KERNEL)
def test_the_kernel_refuses_too(nursery: Nursery, tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    names = f"target, course = {str(target)!r}, {str(sandbox.HIDDEN[0])!r}\n"
    verdict = check(nursery, f"assert {ASKS_THE_KERNEL[name]} < 0, 'it could'", f"import os\n{LIBC}{names}")
    assert verdict.state == "passed", repr(verdict)
    assert target.read_text() == "kept" and list(tmp_path.iterdir()) == [target]


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
