"""A folder that is hidden below one that is shown, as `course` is where a wheel brought it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit import namespaces

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def test_what_is_given_in_a_hidden_folder_is_there_and_nothing_else_of_it(tmp_path: Path) -> None:
    lib, scratch = tmp_path / "lib", tmp_path / "scratch"
    course = lib / "course"
    for name in ("torch.py", "course/__init__.py", "course/01_a/given/tool.py", "course/01_a/checks/one.py"):
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / name).write_text("here")
    scratch.mkdir()
    given = [str(course / "__init__.py"), str(course / "01_a" / "given")]

    def seen() -> None:
        namespaces._unshare(namespaces._NEWNET)
        namespaces.own_root([str(lib)], [str(course / "01_a"), str(course)], str(scratch), 1 << 20, given=given)
        found = sorted(path.relative_to(lib).as_posix() for path in lib.rglob("*") if path.is_file())
        assert found == ["course/01_a/given/tool.py", "course/__init__.py", "torch.py"], found
        for folder in (lib, course, course / "01_a", course / "01_a" / "given"):
            with pytest.raises(OSError, match="Read-only"):
                (folder / "new").touch()

    if not namespaces._works(lambda: namespaces._unshare(namespaces._NEWNET)):
        pytest.skip("this machine has no namespaces for us")
    assert namespaces._works(seen)
