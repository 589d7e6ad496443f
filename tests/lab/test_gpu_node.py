"""Labs on a machine with GPUs: what they show is what a laptop shows, except in cells that ask for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minimegatron.comm.launch import launch
from tests.lab import gpu_node
from tests.lab.kernel import Kernel
from tests.lab.test_magics import OPEN, RANK

SEES = "import os, torch; print(torch.cuda.device_count(), repr(os.environ['CUDA_VISIBLE_DEVICES']))"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    with Kernel(folder, **gpu_node.environment(folder / "node", 4)) as running:
        running.run(OPEN)
        yield running


def test_ranks_of_a_cell_are_on_cpus(kernel: Kernel) -> None:
    """Were they on GPUs, `init` would take NCCL and the sum of two CPU tensors would fail."""
    assert kernel.run(SEES) == ("4 '0,1,2,3'", ""), "the kernel itself is on a machine with GPUs"
    cell = f"{SEES}\n{RANK}x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item(), dist.get_backend())\nfinish()"
    said = kernel.run(f"%%torchrun -n 2 --name sums\n{cell}")
    assert said.error == "" and said.text.splitlines() == [
        "$ CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2 .work/00_mini/sums.py",
        "2 ranks on CPUs (gloo)",
        "[ranks 0-1] 0 ''",
        "[ranks 0-1] 2.0 gloo",
    ]


def test_warm_ranks_are_on_cpus(kernel: Kernel) -> None:
    assert kernel.run(f"%%ranks 2\n{SEES}") == ("[ranks 0-1] 0 ''", "")


def test_a_cell_gets_the_gpus_it_asks_for(kernel: Kernel) -> None:
    """As many ranks as GPUs, or as many as it says; on the script's own word alone, for nobody called `init`."""
    assert kernel.run(f"%%torchrun --gpus 2 --name wide\n{SEES}").text.splitlines() == [
        "$ torchrun --standalone --nproc-per-node=4 .work/00_mini/wide.py",
        "4 ranks on GPUs",
        "[ranks 0-3] 4 '0,1,2,3'",
    ]
    said = kernel.run(f"%%torchrun -n 1 --gpus --name narrow\n{SEES}")
    assert said.text.splitlines()[1:] == ["1 rank on a GPU", "[rank 0] 4 '0,1,2,3'"]


def test_a_cell_that_finds_too_few_gpus_says_so_and_the_lab_goes_on(kernel: Kernel) -> None:
    for magic in ("%%torchrun --gpus 5", "%%torchrun -n 5 --gpus 2"):
        said = kernel.run(f"{magic} --out run --needs bubble\nprint('never')")
        assert said == ("○ this cell needs 5 GPUs and finds 4 here; the lab goes on without it", "")
        assert kernel.run("run is None").text == "True"


def test_a_script_may_be_given_gpus(tmp_path: Path) -> None:
    script = tmp_path / "sees.py"
    script.write_text(SEES)
    node = gpu_node.environment(tmp_path / "node", 3)
    run = launch(script, 2, tmp_path / "run", env=node, gpus=True)
    assert run.stdout == ["3 '0,1,2'\n"] * 2 and run.where() == "2 ranks on GPUs"
    assert run.cmd.startswith("torchrun "), "nothing is hidden, so nothing stands in front"
