"""The files of one notebook: `.work/<lab>/` beside it.

    .work/01_process_groups/
        exercises/ring_all_reduce.py    a cell %%exercise ring_all_reduce: `from exercises.ring_all_reduce import ...`
        hello.py                        a cell %%torchrun --name hello, as torchrun gets it
        runs/hello/                     what its ranks wrote
        progress.json                   what has been passed (`record`)

A script and the exercises share a folder, which Python puts on the path of a script. So the line that `%%torchrun`
prints works as it stands in a terminal opened in the notebook's folder. Line n of a file is line n of its cell.

An exercise's cell is a module: it sees what it imports itself, no more. That is what lets other processes run it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

from labkit.player import STUB
from labkit.record import Record
from labkit.verdict import Verdict
from minimegatron.errors import ConfigError


class Workspace:
    """The files of one notebook.

    Args:
        lab: name of the lab.
        root: the notebook's folder.
        course: digest of the lab's checks, see `record.course_digest`.
    """

    def __init__(self, lab: str, root: Path, course: str = "") -> None:
        self.root = root.resolve()
        self.folder = self.root / ".work" / lab
        try:
            (self.folder / "exercises").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"this folder cannot be written ({error.strerror})", fix="open the notebook in a folder of your own"
            ) from None
        self.record = Record(self.folder, course)

    def enter(self) -> None:
        """Put the exercises and scripts of this lab, and of no other, on the import path."""
        sys.path[:] = [entry for entry in sys.path if Path(entry).parent.name != ".work"]
        sys.path.insert(0, str(self.folder))
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "exercises" or _lies_in_work(module):
                del sys.modules[name]
        importlib.invalidate_caches()

    def relative(self, path: Path) -> str:
        """The path as the learner sees it: the same on every machine."""
        return path.relative_to(self.root).as_posix()

    def save_exercise(self, name: str, line: str, cell: str) -> Path:
        """Keep a cell as the module `exercises.<name>`."""
        path = self.saved(name)
        path.write_text(f"# %%exercise {line}\n{cell}")
        _forget_compiled(path)
        return path

    def save_script(self, name: str, magic: str, cell: str) -> Path:
        """Keep a cell as a script.

        Raises:
            ConfigError: a file of this name would hide a module from the script.
        """
        if not name.isidentifier() or name == "exercises" or self._hides(name):
            raise ConfigError(
                f"`{name}` cannot name a cell: `import {name}` in it would find the cell itself",
                fix="choose another word for --name",
            )
        path = self.folder / f"{name}.py"
        path.write_text(f"# {magic}\n{cell}")
        _forget_compiled(path)
        if name in sys.modules and _lies_in_work(sys.modules[name]):
            del sys.modules[name]  # imported before it was saved again
        importlib.invalidate_caches()
        return path

    def _hides(self, name: str) -> bool:
        if name in sys.stdlib_module_names:
            return True
        spec = importlib.util.find_spec(name)
        return spec is not None and (spec.origin is None or self.folder not in Path(spec.origin).parents)

    def sources(self) -> dict[str, str]:
        """{exercise: text} of all saved exercises."""
        return {path.stem: path.read_text() for path in sorted((self.folder / "exercises").glob("*.py"))}

    def begun(self, name: str) -> bool:
        """Whether a saved exercise is more than the stub."""
        return f'("{STUB}")' not in self.saved(name).read_text()

    def saved(self, name: str) -> Path:
        """The path of a saved exercise."""
        return self.folder / "exercises" / f"{name}.py"

    def define(self, path: Path) -> types.ModuleType:
        """Run a saved exercise in this process, as the module that `from exercises.<name> import ...` finds here."""
        code = compile(path.read_text(), str(path), "exec")
        module = types.ModuleType(f"exercises.{path.stem}")
        module.__file__ = str(path)
        exec(code, module.__dict__)  # noqa: S102  the learner's own code, in a process made for it
        package = sys.modules.get("exercises")
        if package is None or list(getattr(package, "__path__", [])) != [str(path.parent)]:
            for stale in [name for name in sys.modules if name.partition(".")[0] == "exercises"]:
                del sys.modules[stale]
            package = types.ModuleType("exercises")
            package.__path__ = [str(path.parent)]
            sys.modules["exercises"] = package
        sys.modules[module.__name__] = module
        setattr(package, path.stem, module)
        return module

    def remember(self, verdict: Verdict) -> Verdict:
        """Keep a verdict for as long as neither the exercise nor one that it imports nor its checks change.

        Returns:
            The verdict with its attempt.
        """
        return self.record.put(verdict, self.sources())

    def changed_below(self, name: str) -> list[str]:
        """The exercises whose change undid the pass of this one, itself unchanged."""
        return self.record.changed_below(name, self.sources())

    def remembered(self, name: str) -> Verdict | None:
        return self.record.get(name, self.sources())


def _lies_in_work(module: types.ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "").parent.parent.name == ".work"


def _forget_compiled(path: Path) -> None:
    """Remove the compiled form: Python would use it for a new text of the same second and size."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
