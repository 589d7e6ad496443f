"""What a notebook stores holds on another CPU and under other seeds (`make thorough`; see `elsewhere`)."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.notebooks import elsewhere

SOLUTIONS = sorted((elsewhere.ROOT / "solutions").glob("[0-9][0-9]_*.ipynb"))
LABS = sorted((elsewhere.ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
# Every kind of instructions with the stored seeds but this machine's own, which `make test` runs; three more seeds.
# `--trials 4` takes each of those three four times, always with another seed.
RUNS = [("portable", 0), ("avx2", 0), ("portable", 1000), ("avx2", 2000), ("avx512", 3000)]


def test_all_seeds_move_and_nothing_else() -> None:
    cell = """%%ranks 2 --name a
g = torch.Generator().manual_seed(7)  # ä
model = build_model(config, Mesh.build(ParallelConfig(size=2)), 1, spec)
def draw(n, seed=3, k=2): return torch.Generator().manual_seed(seed)
samples(1, seed=0); torch.manual_seed(step * 2)
SEEDS = (1, 2)"""
    moved = elsewhere.shifted(cell, 10)
    assert moved.split("\n")[1:] == [
        "g = torch.Generator().manual_seed(7 + 10)  # ä",
        "model = build_model(config, Mesh.build(ParallelConfig(size=2)), 1 + 10, spec)",
        "def draw(n, seed=3 + 10, k=2): return torch.Generator().manual_seed(seed)",
        "samples(1, seed=0 + 10); torch.manual_seed(step * 2 + 10)",
        "SEEDS = (1 + 10, 2 + 10)",
    ]
    assert elsewhere.shifted("%%exercise a\nmanual_seed(1)", 10) == "%%exercise a\nmanual_seed(1)"


@pytest.mark.thorough
def test_kernels_and_ranks_are_on_the_other_machine_and_a_difference_is_told(tmp_path: Path) -> None:
    able = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    cells = [
        ("%load_ext course\n%lab 00_mini tests.labkit.mini_course", None),
        (able, "DEFAULT\n"),
        (f"%%ranks 2\n{able}", "[ranks 0-1] DEFAULT\n"),
        (f"{able}; print(1.25, torch.Generator().manual_seed(1).initial_seed())", "DEFAULT\n7.5 12\n"),
    ]
    notebook = nbformat.v4.new_notebook()
    for count, (source, said) in enumerate(cells, 1):
        cell = nbformat.v4.new_code_cell(source, execution_count=count)
        cell.metadata = {} if said else {"tags": ["nbval-ignore-output"]}
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=said)] if said else []
        notebook.cells.append(cell)
    path = tmp_path / "solutions" / "00_mini.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    assert elsewhere.run_elsewhere(path, "portable", 11, tmp_path / "loose") == ""
    said = elsewhere.run_elsewhere(path, "portable", 0, tmp_path / "strict")
    assert "1 failed, 3 passed" in said and "7.5 12" in said


@pytest.mark.parametrize("notebook", SOLUTIONS, ids=lambda path: path.stem)
def test_every_seed_of_a_notebook_is_found(notebook: Path) -> None:
    for cell in nbformat.read(notebook, 4).cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%exercise"):
            bare = cell.source.count("manual_seed(") - cell.source.count("manual_seed(seed)")
            assert elsewhere.shifted(cell.source, 97531).count("+ 97531") >= bare


@pytest.mark.thorough
@pytest.mark.timeout(0)  # each run has a deadline
@pytest.mark.parametrize(("machine", "shift"), RUNS)
@pytest.mark.parametrize("notebook", SOLUTIONS, ids=lambda path: path.stem)
def test_a_solution_says_the_same(
    notebook: Path, machine: str, shift: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if not elsewhere.possible(machine):
        pytest.skip(f"this CPU does not have the instructions of {machine}")
    for trial in range(pytestconfig.getoption("--trials") if shift else 1):
        said = elsewhere.run_elsewhere(notebook, machine, shift + 10_000 * trial, tmp_path / str(trial))
        assert not said, said


@pytest.mark.thorough
@pytest.mark.timeout(elsewhere.SECONDS + 60)
@pytest.mark.parametrize("notebook", LABS, ids=lambda path: path.stem)
def test_an_untouched_lab_says_the_same(notebook: Path, tmp_path: Path) -> None:
    said = elsewhere.run_elsewhere(notebook, "portable", 1000, tmp_path)
    assert not said, said
