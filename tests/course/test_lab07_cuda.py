"""A learner's CUDA C++: what is counted, what is refused and in which words, and what its compiler may reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from course.lab07 import cuda
from course.lab07.compiling import build_for_gpu, build_library
from course.lab07.cuda import CompileError, Kernel, KernelError
from course.lab07.text import digest, kernel_of, texts

from labkit import sandbox, tools
from labkit.fresh import Nursery
from labkit.hbm import Memory
from labkit.judge import judge
from labkit.nursery import Limits
from minimegatron.errors import ConfigError
from minimegatron.kernels import build
from tests.labkit.cells import exercise_cells

LAB = "07_kernels_flash_fp8"
ROOT = Path(__file__).resolve().parents[2]

# how 0: a thread a number; 1: four numbers at once; 2: every 8th number; 3: each number squared, one past the end
MOVE = Kernel(r"""
__global__ void move(const float* x, float* y, int n, int how) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (how == 0 && i < n) y[i] = x[i];
  if (how == 1 && i < n / 4) {
    const float4* x4 = reinterpret_cast<const float4*>(x);
    reinterpret_cast<float4*>(y)[i] = x4[i];
  }
  if (how == 2 && 8 * i < n) y[8 * i] = x[8 * i];
  if (how == 3 && i <= n) y[i] = x[i] * x[i];
  if (how == 4 && i < n) y[i] += x[i];
  if (how == 5 && i < n / 4 - 1) { const float4* odd = (const float4*)(x + 1); y[i] = odd[i].x; }
}
""")


def moved(how: int, n: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(n), torch.zeros(n)
    MOVE(x, y, n, how, grid=n // 64, block=64)
    return x, y


def test_accesses_are_counted_by_array_width_and_sector():
    x, y = moved(0)
    assert torch.equal(x, y)
    of_x, of_y = MOVE.counts["x"], MOVE.counts["y"]
    assert (of_x["loads"], of_x["read"], of_x["served"], of_x["share"]) == (256, 1024, 1024, 1.0)
    assert (of_y["stores"], of_y["written"], of_y["read"], of_x["written"]) == (256, 1024, 0, 0)
    x, y = moved(1)
    assert torch.equal(x, y)
    assert (MOVE.counts["x"]["loads"], MOVE.counts["x"]["read"], MOVE.counts["y"]["stores"]) == (64, 1024, 64)
    moved(2)
    assert (MOVE.counts["x"]["loads"], MOVE.counts["x"]["served"], MOVE.counts["x"]["share"]) == (32, 1024, 0.125)
    x, y = moved(4)
    assert torch.equal(x, y) and MOVE.counts["y"]["read"] == MOVE.counts["y"]["written"] == 1024


def test_an_access_out_of_bounds_or_between_multiples_of_16_bytes_says_who_and_where():
    with pytest.raises(KernelError, match=r"700: thread 0 of block 4 reads x\[256\]; it has 256 numbers"):
        x, y = torch.randn(256), torch.zeros(256)
        MOVE(x, y, 256, 3, grid=5, block=64)
    with pytest.raises(KernelError, match=r"716: thread 0 of block 0 reads x\[1\] as float4"):
        moved(5)
    x, y = moved(0)  # and the next launch is a clean one
    assert torch.equal(x, y)


def test_a_number_loaded_twice_in_a_row_is_in_a_register():
    x, y = torch.randn(256), torch.zeros(256)
    MOVE(x, y, 255, 3, grid=4, block=64)
    assert torch.equal(y, x * x) and MOVE.counts["x"]["loads"] == 256


HALVES = Kernel(r"""
__global__ void halves(const __nv_bfloat16* x, __nv_bfloat16* y, int how, int past) {
  int i = threadIdx.x + past;
  if (how == 0) y[i] = __float2bfloat16(__bfloat162float(x[i]) * 2);
  if (how == 1) y[i] = (float)x[i] * 2;
  if (how == 2) y[i] = x[i] + x[i];
  if (how == 3) y[i] = __hmul(x[i], 2.0f);
  if (how == 4) y[i] = 0.0f, y[i] += x[i], y[i] += x[i];
}
""")


@pytest.mark.parametrize("how", range(5))
def test_bf16_is_counted_where_it_is_handed_on_straight_from_memory(how):
    """The compiler has no call for an argument that is a struct; a number past the end was read in silence."""
    x, y = torch.arange(32.0).bfloat16(), torch.zeros(32).bfloat16()
    HALVES(x, y, how, 0, grid=1, block=32)
    assert torch.equal(y, 2 * x)
    times = 2 if how == 4 else 1  # what is loaded twice in a row is in a register
    assert HALVES.counts["x"]["read"] == 64 * times and HALVES.counts["y"]["written"] == (192 if how == 4 else 64)
    with pytest.raises(KernelError, match=r"(reads x|writes y)\[32\]; it has 32"):
        HALVES(x, y, how, 1, grid=1, block=32)


SWAP = Kernel(r"""
__global__ void swap(const float* x, float* y, int width) {
  y[threadIdx.x] = __shfl_xor_sync(0xffffffff, x[threadIdx.x], 1, width);
}
""")


def test_a_shuffle_is_among_a_warp_or_a_part_of_it():
    x, y = torch.arange(32.0), torch.zeros(32)
    for width in (32, 16, 2):
        SWAP(x, y, width, grid=1, block=32)
        assert torch.equal(y, x.view(16, 2).flip(1).flatten())
    with pytest.raises(KernelError, match="a shuffle among 12 lanes"):
        SWAP(x, y, 12, grid=1, block=32)


def test_arguments_that_do_not_fit_are_refused_before_the_launch():
    x = torch.randn(64)
    for args, words in (((x, x, 64), "takes 4 arguments"), ((x.double(), x, 64, 0), "x wants a contiguous tensor"),
                        ((x, x[::2], 64, 0), "y wants a contiguous"), ((x, x, 64.0, 0), "n wants int")):  # fmt: skip
        with pytest.raises(KernelError, match=words):
            MOVE(*args, grid=1, block=64)


def test_the_compilers_words_come_with_the_line_of_the_cell_and_the_learners_types():
    text = "__global__ void k(float* y) {\n  float z = y;\n}"
    cell = f'from course.lab07.cuda import Kernel\nkernel = Kernel(r"""\n{text}\n""")\n'
    [(source, line, _)] = texts(cell)
    with pytest.raises(CompileError) as error:
        build_library(source, line, "k")
    assert error.value.line == 4 and "cannot convert `float*` to `float`" in error.value.what


def test_what_is_called_in_a_header_is_known_by_the_line_that_calls_it():
    """The lines of what the text itself does, too: `std::max` reads by reference, in a file of the compiler's."""
    kernel = Kernel(r"""
#include <algorithm>
__global__ void k(const float* x, float* y, int n) {
  y[0] = x[0];
  float one = __ldg(x + n);
  y[1] = std::max(one, x[0]);
  atomicAdd(y + 7, one);
}""")
    for n, words, line in ((9, r"reads x\[9\]; it has 4", 4), (0, r"changes y\[7\]; it has 2", 6)):
        with pytest.raises(KernelError, match=words) as error:
            kernel(torch.zeros(4), torch.zeros(2), n, grid=1, block=1)
        assert error.value.line == kernel.line + line


def test_tensors_that_share_memory_share_it_in_the_kernel():
    x = torch.arange(12.0)
    MOVE(x[:8], x[4:], 8, 0, grid=1, block=8)
    assert torch.equal(x, torch.tensor([0.0, 1, 2, 3] * 3))  # thread i reads what thread i - 4 has written
    MOVE(x, x, 12, 4, grid=1, block=12)
    assert torch.equal(x, 2 * torch.tensor([0.0, 1, 2, 3] * 3))


def test_the_parts_of_a_float4_are_one_load():
    text = r"""
__global__ void k(const float* x, const float* g, float* y) {
  const float4* x4 = reinterpret_cast<const float4*>(x);
  const float4* g4 = reinterpret_cast<const float4*>(g);
  int i = threadIdx.x;
  reinterpret_cast<float4*>(y)[i] = make_float4(x4[i].x * g4[i].x, x4[i].y * g4[i].y, x4[i].z * g4[i].z, x4[i].w);
}"""
    kernel = Kernel(text)
    x, g, y = torch.randn(64), torch.randn(64), torch.zeros(64)
    kernel(x, g, y, grid=1, block=16)
    want = x * g
    want[3::4] = x[3::4]
    assert torch.equal(y, want)
    counted = [kernel.counts[name] for name in ("x", "g")]
    assert [(one["loads"], one["read"], one["served"]) for one in counted] == [(16, 256, 256), (16, 192, 256)]
    by_number = Kernel(text.replace("const float4*", "const float*").replace("x4[i].x", "x4[4 * i]").replace(
        "x4[i].y", "x4[4 * i + 1]").replace("x4[i].z", "x4[4 * i + 2]").replace("x4[i].w", "x4[4 * i + 3]").replace(
        "g4[i].x", "1").replace("g4[i].y", "1").replace("g4[i].z", "1"))  # fmt: skip
    by_number(x, g, y, grid=1, block=16)
    assert by_number.counts["x"]["loads"] == 64


@pytest.mark.thorough
@pytest.mark.skipif(build.compiler("cuda") is None, reason="no nvcc here")
@pytest.mark.parametrize("name", ["add", "norm_block", "norm_warp", "norm_registers", "norm_bf16", "norm_backward"])
def test_nvcc_takes_the_solutions(name, tmp_path):
    for source, line, _ in texts(exercise_cells(LAB, solved=True)[name]):
        kernel = kernel_of(source, line)
        assert build_for_gpu(source, line, kernel.name, cache=tmp_path, capability=(9, 0)).is_file()


# ---------------------------------------------------------------------------------------------------- in a check


SCALE = Kernel(r"""
__global__ void scale(const float* x, float* y, int n, float by, int how) {
  int i = threadIdx.x;
  if (how == 1) y[n] = 0;
  if (how == 2) y[i] += x[i];
  else if (i < n) y[i] = by * x[i];
}
""")


@pytest.fixture
def noted(monkeypatch, tmp_path):
    """As in the process of a check: the libraries are there, and launches are noted."""
    library = build_library(SCALE.source, SCALE.line, "scale").read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        tools, "prepared", {digest(SCALE.source): torch.frombuffer(bytearray(library), dtype=torch.uint8)}
    )
    cuda._emulator.cache_clear()
    yield lambda: tools.take_notes().get("launch", [])
    tools.take_notes()
    cuda._emulator.cache_clear()


def test_in_a_check_a_launch_is_noted_with_what_it_was_given_and_wrote_in_every_order(noted):
    x, y = torch.arange(8.0), torch.full((8,), 5.0)
    SCALE(x, y, 8, 2.0, 0, grid=1, block=8)
    assert torch.equal(y, 2 * x) and SCALE.counts["x"]["loads"] == 8
    [record] = noted()
    assert record["name"] == "scale" and record["numbers"] == {"n": 8, "by": 2.0, "how": 0}
    assert torch.equal(record["arrays"]["x"], x) and record["arrays"]["y"].eq(5).all()
    assert [torch.equal(outputs["y"], 2 * x) for outputs in record["outputs"]] == [True] * len(cuda.ORDERS)
    assert record["writes"]["y"].tolist() == [1] * 8 and record["error"] == ""
    with pytest.raises(KernelError, match="was not compiled before the check"):
        Kernel("__global__ void other(float* y) {}")(y, grid=1, block=1)


def test_in_a_check_what_was_in_an_array_before_is_no_answer(noted):
    x, y = torch.ones(8), torch.ones(8)
    SCALE(x, y, 4, 2.0, 0, grid=1, block=8)
    assert y.isnan().tolist() == [False] * 4 + [True] * 4
    SCALE(x, y, 8, 2.0, 2, grid=1, block=8)
    assert y.isnan().all() and "reads y[0] before the kernel has written it" in noted()[1]["note"]


def test_in_a_check_a_launch_that_fails_is_noted_too(noted):
    with pytest.raises(KernelError, match=r"writes y\[8\]; it has 8 numbers"):
        SCALE(torch.ones(8), torch.ones(8), 8, 2.0, 1, grid=1, block=8)
    [record] = noted()
    assert "it has 8 numbers" in record["error"] and record["line"] == SCALE.line + 3


def check(nursery: Nursery, source: str) -> Any:
    return judge(nursery, f"course.{LAB}", "add", {"add": source})


@pytest.mark.thorough
def test_a_kernel_that_was_not_there_as_a_text_is_not_run(nursery):
    solved = exercise_cells(LAB, solved=True)["add"]
    hidden = solved.replace('kernel = Kernel(r"""', 'text = (r"""')
    hidden = hidden.replace('""")\n\n\ndef', '""")\nkernel = Kernel(text + "")\n\n\ndef')
    verdict = check(nursery, hidden)
    assert verdict.points == 0 and "was not compiled before the check" in repr(verdict)


def test_a_division_by_0_is_told_with_its_line(nursery):
    solved = exercise_cells(LAB, solved=True)["add"]
    divides = solved.replace("if (i < n) y[i]", "if (i < n) y[i] = i / (n - n);\n  if (i < n) y[i]")
    verdict = check(nursery, divides)
    assert verdict.points == 0 and "divides by 0 (line 8: if (i < n)" in repr(verdict), verdict


@pytest.mark.thorough
def test_without_a_compiler_a_check_says_so_and_an_untouched_lab_needs_none(nursery, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda target: None)
    assert check(nursery, exercise_cells(LAB, solved=False)["add"]).state == "todo"
    with pytest.raises(build.KernelsUnavailable, match=r"no g\+\+ on this machine"):
        check(nursery, exercise_cells(LAB, solved=True)["add"])


def reach(rank: int, world: int, job: dict[str, str]) -> dict[str, Any]:
    """What a program can do that the compiling process starts."""
    sandbox.enter(Path.cwd(), programs=True)
    read = subprocess.run(["cat", job["course"]], capture_output=True, timeout=10)
    wrote = subprocess.run(["touch", job["outside"]], capture_output=True, timeout=10)
    own = subprocess.run(["touch", "mine"], capture_output=True, timeout=10)
    return {"read": len(read.stdout), "wrote": wrote.returncode == 0, "own": own.returncode == 0}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part exists on Linux only")
def test_the_compiler_can_write_into_its_folder_only_and_cannot_read_the_checks(nursery, tmp_path):
    job = {
        "course": str(sandbox.HIDDEN[0] / "07_kernels_flash_fp8" / "checks" / "norm.py"),
        "outside": str(tmp_path / "x"),
    }
    assert Path(job["course"]).is_file()
    [reply] = nursery.call(reach, [job], Limits(seconds=20), path=[str(ROOT)])
    assert reply.value == {"read": 0, "wrote": False, "own": True}


# ------------------------------------------------------------------------------------------------ the other memory


def test_a_memory_counts_what_is_loaded_and_stored():
    k, out = torch.randn(6, 2), torch.zeros(6, 2)
    memory = Memory(k=k, out=out)
    tile = memory.load("k", 2, 5)
    tile.zero_()  # a copy
    memory.store("out", 0, 2, torch.ones(2, 2))
    assert k.abs().min() > 0 and out.sum() == 4
    assert (memory.loaded, memory.stored, memory.moved) == ({"k": 6, "out": 0}, {"k": 0, "out": 4}, 10)
    for wrong in (lambda: memory.load("k", 4, 7), lambda: memory.load("k", 3, 3), lambda: memory.load("v", 0, 1),
                  lambda: memory.store("out", 0, 2, torch.ones(2))):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()
    assert memory.moved == 10


def test_a_stub_in_a_kernel_is_cuda_and_one_in_python_is_python():
    from labkit.source import notebooks

    built = {path.parent.name: book for book, path in notebooks(ROOT / "course" / LAB / "lab.py")}
    text = {kind: "\n".join(cell.source for cell in book.cells) for kind, book in built.items()}
    assert text["labs"].count('  not_implemented("your code here");\n') == 10
    assert "SOLUTION" not in text["labs"] + text["solutions"] and "parts[threadIdx.x + s]" in text["solutions"]
    assert (
        "parts[threadIdx.x + s]" not in text["labs"] and 'raise NotImplementedError("your code here")' in text["labs"]
    )
    assert "not_implemented(" not in text["solutions"].replace("`not_implemented`", "")
