"""Progress bars start no process, also where `multiprocessing` does not fork by default (from Python 3.14 on)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import multiprocessing, os
from minimegatron.launch import procs
multiprocessing.set_start_method("forkserver")
{bar}
bar.update(3)
bar.close()
print("processes", len(procs.children(os.getpid())))
"""
OURS = 'from minimegatron.data.indices import progress_bar\nbar = progress_bar(3, "counting", True)'
PLAIN = 'from tqdm import tqdm\nbar = tqdm(total=3, desc="counting")'


@pytest.mark.parametrize("bar, processes", [(OURS, 0), (PLAIN, 1)], ids=["ours", "plain"])
def test_a_bar_starts_no_process(bar: str, processes: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(bar=bar)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"processes {processes}\n", done.stderr


def test_no_other_module_draws_with_a_lock_between_processes() -> None:
    packages = (ROOT / package for package in ("minimegatron", "labkit", "course"))
    files = [path for package in packages for path in package.rglob("*.py")]
    drawing = [path.name for path in files if re.search(r"^\s*(from|import) tqdm\b", path.read_text(), re.M)]
    assert drawing == ["bars.py"]
