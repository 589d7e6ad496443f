"""Labs on a machine with GPUs: what they show is what a laptop shows, except in cells that ask for GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit import magics
from labkit.ranks.torchrun import Run
from tests.labkit import gpu_node
from tests.labkit.kernel import Kernel
from tests.labkit.test_magics import OPEN, RANK

pytestmark = pytest.mark.thorough

HIDDEN = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    with Kernel(folder, **gpu_node.environment(folder / "node", 4)) as running:
        running.run(OPEN)
        yield running


def test_ranks_of_a_cell_are_on_cpus(kernel: Kernel) -> None:
    """Were they on GPUs, `init` would take NCCL and the sum of two CPU tensors would fail."""
    assert kernel.run("import torch; torch.cuda.device_count()") == ("4", ""), "the kernel's own machine has GPUs"
    cell = f"{HIDDEN}\n{RANK}x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item(), dist.get_backend())\nfinish()"
    said = kernel.run(f"%%torchrun -n 2 --name sums\n{cell}")
    assert said.error == "" and said.text.splitlines() == [
        "$ CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2 .work/00_mini/sums.py",
        "2 ranks on CPUs (gloo)",
        "[ranks 0-1] ''",
        "[ranks 0-1] 2.0 gloo",
    ]


def test_warm_ranks_are_on_cpus(kernel: Kernel) -> None:
    assert kernel.run(f"%%ranks 2\n{HIDDEN}\nimport torch; print(torch.cuda.device_count())") == (
        "[ranks 0-1] ''\n[ranks 0-1] 0", ""
    )  # fmt: skip


def test_a_cell_gets_the_gpus_it_asks_for(kernel: Kernel) -> None:
    """As many ranks as there are GPUs; which library they talk by nobody knows, for nobody called `init`."""
    assert kernel.run(f"%%torchrun --gpus 2 --name wide\n{HIDDEN}").text.splitlines() == [
        "$ torchrun --standalone --nproc-per-node=4 .work/00_mini/wide.py",
        "4 ranks on GPUs",
        "[ranks 0-3] '0,1,2,3'",
    ]


def test_a_cell_that_finds_too_few_gpus_says_so_and_the_lab_goes_on(kernel: Kernel) -> None:
    for magic in ("%%torchrun --gpus 5", "%%torchrun -n 5 --gpus 2"):
        said = kernel.run(f"{magic} --out run --needs bubble\nprint('never')")
        assert said == ("○ this cell needs 5 GPUs and finds 4 here; the lab goes on without it", "")
        assert kernel.run("run is None").text == "True"


def test_a_cell_may_want_fewer_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert magics._with_gpus(1, 1) == 1 and magics._with_gpus(2, 3) == 3 and magics._with_gpus(4, None) == 4


def test_the_line_above_the_output_says_what_the_ranks_had() -> None:
    made = (1, 1.0), (4, 1.0, False, "gloo"), (1, 1.0, True), (2, 1.0, True, "nccl")
    runs = [Run("", Path(), *rest) for rest in made]
    assert [run.where() for run in runs] == [
        "1 rank on a CPU", "4 ranks on CPUs (gloo)", "1 rank on a GPU", "2 ranks on GPUs (NCCL)"
    ]  # fmt: skip


def test_tests_see_no_gpu() -> None:
    """What this process hides its ranks and notebooks inherit; `pytest --gpus` is for those who want them."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" or "--gpus" in sys.argv
