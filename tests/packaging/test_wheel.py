"""What a wheel and a source archive have in them, and a learner's first hour with the wheel in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from minimegatron.commands.my_labs import digest
from minimegatron.kernels import build, prebuilt

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("minimegatron", "labkit", "course")


def tracked(*folders: str) -> set[str]:
    """The files of these folders that git knows or would add."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    if not (names := {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}):
        pytest.skip("this is no checkout")
    return names


def wanted() -> set[str]:
    """The files that a wheel has, but for kernels and metadata."""
    notebooks = {f"course/{name}" for name in tracked("labs", "solutions")}
    return tracked(*PACKAGES) | notebooks


def setup(*words: str, without_compiler: bool = False) -> None:
    environment = {**os.environ, "PATH": "" if without_compiler else os.environ["PATH"]}
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_built_has_every_file_of_the_packages_and_the_notebooks(tmp_path: Path) -> None:
    target = tmp_path / "lib"
    setup("egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(target), without_compiler=True)
    built = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert built == wanted()
    assert (tmp_path / "50-minimegatron.py").read_text() == (ROOT / "labkit" / "ipython_startup.py").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built of it and of nothing else."""
    folder = tmp_path_factory.mktemp("dist")
    setup("egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, str(archive)], check=True, timeout=280)
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


@pytest.mark.thorough
def test_the_source_archive_is_a_checkout(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert tracked(".") <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".so")]


@pytest.mark.thorough
def test_a_wheel_has_every_kernel_for_every_level(built: tuple[Path, Path]) -> None:
    if not prebuilt.can_build():
        pytest.skip("there is no compiler")
    assert "-py3-none-linux_x86_64" in built[1].name
    names = set(zipfile.ZipFile(built[1]).namelist())
    folder = Path("minimegatron/kernels/prebuilt")
    kernels = {str(prebuilt.place(n, level, folder)) for n in build.sources("cpp") for level in prebuilt.LEVELS}
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    startup = info.replace(".dist-info", ".data/data/etc/ipython/startup/50-minimegatron.py")
    assert {name for name in names if not name.startswith(info)} == wanted() | kernels | {startup}


def hosted_cell() -> str:
    """The first cell of a hosted notebook, as docs/installing.md has it."""
    (cell,) = re.findall(r"^```python\n(%pip .*?)^```", (ROOT / "docs" / "installing.md").read_text(), re.M | re.S)
    return str(cell)


def test_the_cell_for_hosted_notebooks_has_all_that_labs_need_but_jupyterlab() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {"jupyterlab", "ipykernel", "nbclient"}  # the host is one; nbclient executes notebooks from outside
    first, *rest = hosted_cell().splitlines()
    words = shlex.split(first)
    assert words[:4] == ["%pip", "install", "-q", "minimegatron @ WHEEL"]
    assert words[4:] == sorted(set(project["optional-dependencies"]["lab"]) - there)
    compile("\n".join(rest), "cell", "exec")


class Learner:
    """An environment with the wheel, and an empty folder."""

    def __init__(self, wheel: Path, folder: Path, hosted: bool = False) -> None:
        self.folder, venv = folder / "empty", folder / "venv"
        self.folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
        self.python = venv / "bin" / "python"
        (self.packages,) = venv.glob("lib/python3*/site-packages")
        # torch and JupyterLab are those of the tests; this line names them after the wheel, and no checkout.
        (self.packages / "of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-index"]
        if hosted:  # the cell for hosted notebooks, with a torch that is there
            line = hosted_cell().splitlines()[0].removeprefix("%pip install -q ").replace("WHEEL", f"file://{wheel}")
            subprocess.run([*pip, *shlex.split(line)], check=True, timeout=120)
        else:
            subprocess.run([*pip, f"minimegatron[lab] @ file://{wheel}"], check=True, timeout=120)

    def call(self, *words: str, expected: int = 0, seconds: float = 250) -> str:
        """The output of `minimegatron` with these words."""
        return self.run("-m", "minimegatron", *words, expected=expected, seconds=seconds)

    def run(self, *words: str, expected: int = 0, seconds: float = 250, **variables: str) -> str:
        """The output of Python with these words."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "JUPYTER"))}
        environment |= {"OMP_NUM_THREADS": "1", **variables}
        command: Sequence[str] = [str(self.python), *words]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == expected, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def execute(self, notebook: Path) -> None:
        """Run a notebook in its folder; an error in a cell is one here."""
        self.run("-c", "from nbclient.cli import main; main()", "--timeout=120", str(notebook))

    def written(self) -> set[Path]:
        """What lies among the packages, but for what Python compiles."""
        return {path for path in self.packages.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}


@pytest.fixture(scope="module")
def learner(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return Learner(built[1], tmp_path_factory.mktemp("learner"))


@pytest.mark.thorough
def test_a_learner_s_first_hour_in_an_empty_folder(learner: Learner) -> None:
    before = learner.written()
    labs = sorted(path.name for path in (ROOT / "labs").glob("*.ipynb"))
    assert f"{len(labs)} notebooks" in learner.call("lab", "--copy-only")
    mine = learner.folder / "my-labs"
    assert sorted(path.name for path in mine.glob("*.ipynb")) == labs
    english = (mine / labs[0]).read_text()
    learner.call("lab", "--copy-only", "--language", "zh")
    assert (mine / labs[0]).read_text() != english
    learner.call("lab", "--copy-only", "--language", "en")
    assert digest(json.loads((mine / labs[0]).read_text())) == digest(json.loads(english)), "the prose is back"
    assert "01_process_groups" in learner.call("progress")
    doctor = json.loads(learner.call("doctor", "--json"))
    assert doctor["facts"]["kernels"]["cpu"] is None and doctor["ways"]["labs"] == "JupyterLab: minimegatron lab"
    train = ("--preset", "laptop-10m", "--corpus", "stdlib", "--train-iters", "2", "--lr", "1e-3")
    assert "iteration        2/       2" in learner.call("train", *train)
    assert (learner.folder / ".corpus").is_dir() and learner.written() == before


@pytest.mark.thorough
def test_a_solution_runs_and_gets_full_marks(learner: Learner) -> None:
    """The judge's sandbox closes `course` where it lies below the interpreter's own `lib`, too."""
    before, name = learner.written(), "01_process_groups"
    work = learner.folder / "submitted"
    work.mkdir()
    notebook = work / f"{name}.ipynb"
    notebook.write_bytes((learner.packages / "course" / "solutions" / f"{name}.ipynb").read_bytes())
    learner.execute(notebook)
    notebook.rename(work / "ada.ipynb")
    (row,) = [line for line in learner.call("grade", str(work), "--lab", name).splitlines() if "ada" in line]
    assert "54/54" in row
    assert "54/54" in learner.call("progress", str(work)) and learner.written() == before


@pytest.mark.thorough
def test_a_submission_finds_the_tools_of_its_lab_and_no_solution(learner: Learner) -> None:
    """With `course` in site-packages, a mount hides it with `given/` in it, which cells import."""
    program = """
import os, sys, tempfile
from pathlib import Path
from labkit import sandbox, promises
from labkit.fresh import Nursery
import course
with Nursery() as nursery:
    nursery.warm_up()
    held = promises.tried(nursery, [])
    assert all(held.values()), held
sandbox.begin(tempfile.mkdtemp())
sandbox.restrict(Path(tempfile.mkdtemp()))
here = Path(course.__file__).parent
print([path.name for path in (here / "07_kernels_flash_fp8").iterdir()])
from course.lab07.cuda import Kernel
assert not (here / "solutions").exists() and not (here / "01_process_groups").exists()
try:
    (here / "07_kernels_flash_fp8" / "given" / "x").touch()
except OSError:
    print("read-only")
"""
    said = learner.run("-c", program)
    assert "['given']" in said and "read-only" in said


@pytest.mark.thorough
def test_the_cell_for_hosted_notebooks_installs_and_a_notebook_runs(built, tmp_path: Path) -> None:
    learner = Learner(built[1], tmp_path, hosted=True)
    learner.run("-c", "\n".join(hosted_cell().splitlines()[1:]))
    name = "01_process_groups.ipynb"
    (learner.folder / name).write_bytes((learner.packages / "course" / "solutions" / name).read_bytes())
    learner.execute(learner.folder / name)
    assert "54/54" in learner.call("progress", ".")
