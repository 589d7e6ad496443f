"""The generator of wrong variants: each kind of edit at its place, and nowhere else."""

from __future__ import annotations

import importlib

import pytest

from tests.course.mutants import Cell, cells, mutants

LAB = '''
# %%
# %%exercise total
import torch.distributed as dist


def total(x, group):
    """The sum over 3 ranks."""
    ### BEGIN SOLUTION
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x
    ### END SOLUTION


# %%
check("total")
'''
KERNEL = '''kernel = Kernel(r"""
__global__ void scale(const float* x, int n) {
  // for i < n
  for (int i = threadIdx.x; i < n; i += 32) s += x[i] / n;
  __syncthreads();
}
""")
'''


def made(line: str) -> set[str]:
    """What stands in place of one line."""
    cell = Cell(f"def f():\n    {line}\n", frozenset({2}))
    return {one.source.splitlines()[1].strip() for one in mutants("f", cell)}


@pytest.mark.parametrize(
    ("line", "variants"),
    [
        ("dist.all_reduce(x, group=g)", {"pass", "dist.all_reduce(x)"}),
        ("dist.all_reduce(x)", {"dist.all_reduce(x, op=__import__('torch').distributed.ReduceOp.MAX)"}),
        ("work.wait()", {"pass"}),
        ("h = dist.isend(x, 1)", {"h = (lambda work: (work.wait(), work)[1])(dist.isend(x, 1))"}),
        ("n = dist.get_world_size(g)", {"n = 2", "n = dist.get_world_size()"}),
        ("r = dist.get_rank(g)", {"r = dist.get_rank()"}),
        ("n = tp.size", {"n = 2"}),
        ("right = (rank + 1) % n", {"right = (1 - rank)", "right = (rank + 1)", "right = ((rank - 1)) % n"}),
        ("y = x.sum(dim=0)", {"y = x.sum()", "y = x.sum(dim=1)", "y = x.mean(dim=0)"}),
        ("y = torch.cat(xs, -1)", {"y = torch.cat(xs, 0)"}),
        ("y = x.topk(k, dim=-1)", {"y = x.topk(k, dim=0)"}),
        ("y = a * b", {"y = a", "y = b"}),
        ("y = a / n", {"y = a", "y = (a // n)", "y = (a * n)"}),
        ("y = a // b", {"y = (-(-a // b))", "y = (a / b)"}),
        ("y = a - b", {"y = (a + b)", "y = a"}),
        ("y = -a", {"y = a"}),
        ("ok = a < b", {"ok = (a <= b)"}),
        ("ok = a and b", {"ok = (a or b)", "ok = a", "ok = b"}),
        ("y = a if c else b", {"y = a", "y = b"}),
        ("y = min(a, b)", {"y = max(a, b)", "y = a", "y = b"}),
        ("y = x.contiguous().detach()", {"y = x.contiguous()", "y = x.detach()"}),
        ("y = xs[a:b]", {"y = xs[a:]", "y = xs[:b]", "y = xs[a + 1:b]", "y = xs[a:b + 1]"}),
        ("for i in range(n): g(i)", {"for i in range(n - 1): g(i)", "for i in range(n + 1): g(i)"}),
        ("total += x", {"pass", "total = x"}),
        ("y = sorted(xs)", {"y = list(xs)"}),
        ("y = [i for i in xs if i]", {"y = [i for i in xs]"}),
        ("y = F.linear(copy_to(x, tp), w, b)", {"y = F.linear(x, w, b)", "y = F.linear(copy_to(x, tp), w)"}),
        ("y = 3", {"y = 4", "y = 2"}),
        ("y = 0.5", {"y = 1.0"}),
        ("y = x.tensor_split(n)", {"y = x.chunk(n)"}),
    ],
)
def test_each_kind_of_edit(line: str, variants: set[str]) -> None:
    assert variants <= made(line)


def test_texts_and_annotations_are_left_alone() -> None:
    assert made('raise ValueError(f"{n + 1}")') == made("'''n + 1'''") == made("y: Pair[3] = x") == set()


def test_only_lines_of_the_solution_are_edited() -> None:
    cell = cells(LAB)["total"]
    assert cell.solution == {6, 7, 8} and "SOLUTION" not in cell.text
    found = mutants("total", cell)
    assert [one.name for one in found] == [
        "line 6: `.clone()` dropped", "line 7: `dist.all_reduce(x, group=group)` dropped", "line 7: `group` dropped",
        "line 7: op MAX for SUM",
    ]  # fmt: skip
    assert found[2].edited == "dist.all_reduce(x)" and found[2].source == cell.text.replace(", group=group", "")


def test_kernels_are_edited_as_text_and_their_comments_are_not() -> None:
    own = importlib.import_module("course.lab07.edits").edits
    found = mutants("scale", Cell(KERNEL, frozenset({3, 4, 5})), own)
    assert {one.name.partition(":")[0] for one in found} == {"line 4", "line 5"}
    edited = {one.edited for one in found}
    assert "__syncthreads();" not in edited and ";" in edited
    for change in (("i < n", "i <= n"), ("32", "16"), ("s +=", "s ="), (" / n", " "), ("threadIdx.x", "0")):
        assert "for (int i = threadIdx.x; i < n; i += 32) s += x[i] / n;".replace(*change) in edited, change
