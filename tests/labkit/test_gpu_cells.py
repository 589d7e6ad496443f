"""The labs' cells that ask for GPUs, on simulated ones; and all others, which must not care whether there are any."""

from __future__ import annotations

import configparser
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from labkit.magics import torchrun_options
from labkit.source import notebooks
from tests.labkit import gpu_node
from tests.labkit.cells import SOURCES, exercise_cells
from tests.labkit.kernel import ROOT, Kernel
from tests.rehearsal import Rehearsal, RehearsalFailed, rehearse

pytestmark = pytest.mark.thorough

# The line of a cell that says its sizes, and one that a CPU can do.
SMALL = {
    "bandwidth": ("LARGEST = 28 ", "LARGEST = 14 "),
    "speed": ("HIDDEN, SEQUENCE = 8192, 4096", "HIDDEN, SEQUENCE = 64, 16"),
    "gpus": ("SIZE = 4096", "SIZE = 32"),
    "long_sequence": ("TOKENS, HEADS = 131072, 32", "TOKENS, HEADS = 256, 8"),
    "grouped": ("ROWS, HIDDEN = 65536, 2048", "ROWS, HIDDEN = 128, 64"),
    "on_gpu": ("ROWS, WIDTH = 16384, 4096", "ROWS, WIDTH = 16, 128"),
    "decode": ("HIDDEN, LAYERS, COUNTS = 2048, 16, (1, 8, 64)", "HIDDEN, LAYERS, COUNTS = 64, 2, (1, 2)"),
}
# A learner's kernel is compiled by nvcc for a GPU; here by g++ for the emulator, on what the simulated tensors hold.
LEARNERS_KERNELS = """
import course.lab07.cuda as cuda
from tests.rehearsal.kernels import EmulatedLibrary
class Emulated:
    def __init__(self, *text):
        self.emulator = cuda._emulator(*text)
    def call(self, launcher, *args):
        self.emulator.launch(args[: len(self.emulator.parameters)], *args[-2:])
def on_gpu(*text):
    library = EmulatedLibrary(Emulated(*text))
    return lambda args, grid, block, shared_mem: library.call("lab_launch", *args, grid, block)
cuda._on_gpu = on_gpu
"""


def cells(source: Path) -> list[tuple[Any, str, str]]:
    """(options, body, lab) of every `%%torchrun` cell that asks for GPUs."""
    found = []
    for cell in jupytext.read(source, fmt="py:percent").cells:
        line, _, body = cell.source.partition("\n")
        if cell.cell_type == "code" and line.startswith("%%torchrun"):
            options = torchrun_options().parse_args(shlex.split(line)[1:])
            found += [(options, body, source.parent.name)] if options.gpus else []
    return found


@functools.cache
def asking() -> dict[str, tuple[Any, str, str]]:
    """{name: (options, body, lab)} of all labs' cells that ask for GPUs."""
    return {options.name: (options, body, lab) for source in SOURCES for options, body, lab in cells(source)}


# Several cells in the same ranks: to import torch takes longer than all of them.
ONE_AFTER_THE_OTHER = """
from minimegatron.launch import rank as launch
(rank, world), finish, report, said = launch.init(), launch.finish, launch.report, {}
launch.init, launch.finish = lambda: (rank, world), lambda: None
for name, body in CELLS.items():
    launch.report = lambda value, name=name: said.update({name: value})
    exec(compile(body, f"cell {name}", "exec"), {"__name__": "__main__"})
report(said)
finish()
"""


def rehearsed(names: list[str], folder: Path, *more: tuple[str, str], **options: Any) -> Rehearsal:
    """Run cells as on two GPUs, or on as many as they say, with small sizes; `more` is replaced as well."""
    bodies, prelude = {}, ""
    for name in names:
        asked, body, lab = asking()[name]
        for old, new in (SMALL[name], *more):
            assert body.count(old) == 1, f"{old!r} is not in the cell once"
            body = body.replace(old, new)
        bodies[name] = body
        if asked.needs:
            prelude = LEARNERS_KERNELS if options.get("kernels", True) else ""
            (folder / "exercises").mkdir()
            for exercise, text in exercise_cells(lab, solved=True).items():
                (folder / "exercises" / f"{exercise}.py").write_text(text)
    options = {"timeout": 600, **options}
    script = f"{prelude}\nCELLS = {bodies!r}\n{ONE_AFTER_THE_OTHER}"
    return rehearse(script, asking()[names[0]][0].nproc or 2, env={"PYTHONPATH": f"{ROOT}:{folder}"}, **options)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the cells for two GPUs and more reported, by rank."""
    names = [name for name, (asked, _, _) in asking().items() if asked.nproc is None]
    return [rank.report for rank in rehearsed(names, tmp_path_factory.mktemp("two")).ranks]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """The cells for one GPU."""
    names = [name for name, (asked, _, _) in asking().items() if asked.nproc == 1]
    return rehearsed(names, tmp_path_factory.mktemp("one"))


def test_what_is_for_gpus_is_a_cell_that_asks_for_them() -> None:
    """The notebook's own process does the same whether there are GPUs or not."""
    assert set(asking()) == set(SMALL)
    for source in SOURCES:
        for cell in jupytext.read(source, fmt="py:percent").cells:
            own = cell.cell_type == "code" and not re.match("%%(torchrun|ranks|exercise)", cell.source)
            assert not (own and re.search(r"torch\.cuda|[\"']cuda[\"']", cell.source)), (
                f"{source.parent.name}: {cell.source}"
            )


def test_bandwidth_of_every_size_is_reported(on_two: list[dict[str, Any]]) -> None:
    points = on_two[0]["bandwidth"]
    assert [nbytes for nbytes, _ in points] == [4 << power for power in (10, 12, 14)]
    assert all(rate > 0 for _, rate in points)


def test_the_mlp_is_timed_on_one_and_on_two_gpus(on_two: list[dict[str, Any]]) -> None:
    assert [tp for tp, _ in on_two[0]["speed"]] == [1, 2]


def test_the_pipeline_runs_on_gpus(on_two: list[dict[str, Any]]) -> None:
    """The events that the figure draws: with p = 2 and 8 microbatches, 8 forward and 8 backward passes a stage."""
    for said in on_two:
        counts = {name: [e[0] for e in events] for name, events in said["gpus"].items()}
        assert [counts["1f1b"].count(kind) for kind in "FBW"] == [8, 8, 0]
        assert [counts["zb_h1"].count(kind) for kind in "FBW"] == [8, 8, 8]


def test_the_long_sequence_runs_on_gpus(on_two: list[dict[str, Any]]) -> None:
    assert [said["long_sequence"] for said in on_two] == [0, 0], "memory is not simulated"


def test_experts_are_timed_one_by_one_and_together(on_one: Rehearsal) -> None:
    said = on_one.report["grouped"]
    assert said["rows"] == 128
    ways = ("a loop", "grouped")
    assert list(said["times"]) == [f"{n} experts, {way}" for n in (8, 64) for way in ways]


def test_the_ladder_runs_on_a_gpu_and_is_right(on_one: Rehearsal) -> None:
    lines = [line for line in on_one.stdout.splitlines() if " right: " in line]
    ways = ("by_rows", "norm_block", "norm_warp", "norm_registers", "norm_bf16", "operations")
    assert [line.split()[:3] for line in lines] == [[way, "right:", "True"] for way in ways]


def test_decode_steps_are_timed_launch_by_launch_and_as_graphs(on_one: Rehearsal) -> None:
    said = on_one.report["decode"]
    assert [(graph, n) for graph, n, _ in said] == [(graph, n) for graph in (False, True) for n in (1, 2)]


@pytest.mark.thorough
def test_a_stage_that_waits_for_every_stream_hangs(tmp_path: Path) -> None:
    """Why the cell waits for the current one: the receive posted ahead waits for what our own products help to make."""
    everything = ("torch.cuda.current_stream().synchronize()", "torch.cuda.synchronize()")
    with pytest.raises(RehearsalFailed, match="longer than"):
        rehearsed(["gpus"], tmp_path, everything, timeout=60)


@pytest.mark.thorough
def test_without_a_compiler_for_gpus_the_ladder_says_so(tmp_path: Path) -> None:
    said = rehearsed(["on_gpu"], tmp_path, kernels=False).stdout
    assert said.startswith("your kernels cannot be compiled for this GPU: no nvcc on this machine; ")
    assert said.count("\n") == 1 and said.rstrip().endswith("(docs/gpu.md)")


@pytest.mark.thorough
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_a_lab_shows_the_same_on_a_machine_with_gpus(source: Path, tmp_path: Path) -> None:
    """All cells of a solution but those that ask for GPUs, beside what is stored; a rank that used a GPU would fail."""
    stored = nbformat.read(source.parents[2] / "solutions" / f"{source.parent.name}.ipynb", 4).cells
    (fresh, _), _ = notebooks(source)
    assert [cell.source for cell in fresh.cells] == [cell.source for cell in stored], "build the notebooks first"
    with Kernel(tmp_path, **gpu_node.environment(tmp_path / "node", 4)) as kernel:
        assert kernel.run("import torch; torch.cuda.device_count()").text == "4"
        for cell in stored:
            if cell.cell_type != "code":
                continue
            line = cell.source.partition("\n")[0]
            if "--gpus" in line:
                said = kernel.run(re.sub(r"--gpus( \d+)?", "--gpus 99", line) + "\npass")
                assert said.text.endswith("finds 4 here; the lab goes on without it"), said
                continue
            said = kernel.run(cell.source, 300)
            assert said.error == "", cell.source
            if "nbval-ignore-output" not in cell.metadata.get("tags", []):
                # what is printed and what is displayed may come in another order
                lines, wanted = (sorted(sanitized(text).splitlines()) for text in (said.text, text_of(cell)))
                assert lines == wanted, cell.source


def text_of(cell: Any) -> str:
    """What a stored cell shows, as `Kernel.run` gives it."""
    said = [o.get("text") or o.get("data", {}).get("text/plain", "") + "\n" for o in cell.outputs]
    return "".join(said).rstrip("\n")


def sanitized(text: str) -> str:
    """As nbval does it, by the same file."""
    rules = configparser.RawConfigParser()
    rules.read(ROOT / "tests" / "nbval_sanitize.cfg")
    for rule in rules.sections():
        text = re.sub(rules[rule]["regex"], rules[rule]["replace"], text)
    return re.sub(r"<Figure size \S+ with .*>", "FIGURE", text)
