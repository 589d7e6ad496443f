"""Every number that lab 01's text states, computed anew: a sentence that drifts from its number fails here."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from course.figures.process_groups import replay, sends_of, start_of

CHECKS = import_module("course.01_process_groups.checks.predicted")
SOURCE = Path(CHECKS.__file__).parents[1] / "lab.py"
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())
SIZES = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}


def group_of(rank: int, axis: str) -> list[int]:
    return next(group for group in CHECKS.axis_groups(SIZES, [axis]) if rank in group)


def coordinates(rank: int) -> dict[str, int]:
    return {axis: group_of(rank, axis).index(rank) for axis in SIZES}


# ---------------------------------------------------------------------------------------- section 6, in one process


def batch(of_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(of_rank)
    ids = torch.randint(0, 64, (4, 17), generator=g)
    return ids, (torch.rand(4, 16, generator=g) < (0.95, 0.15)[of_rank]).float()


def weights() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=g).mul(0.3).requires_grad_() for shape in ((64, 16), (16, 64))]


def losses_of(w: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy((w[0][ids[:, :-1]] @ w[1]).mT, ids[:, 1:], reduction="none")


def loss_and_norm(divisors: list[float]) -> tuple[float, float]:
    """Of both ranks' masked losses, each divided by its number, and summed."""
    w = weights()
    loss = torch.stack([(losses_of(w, ids) * mask).sum() / d for (ids, mask), d in zip(BATCHES, divisors, strict=True)])
    loss.sum().backward()
    return loss.sum().item(), torch.cat([p.grad.flatten() for p in w if p.grad is not None]).norm().item()


BATCHES = [batch(0), batch(1)]
COUNTS = [int(mask.sum()) for _, mask in BATCHES]
WRONG, RIGHT = loss_and_norm([2 * count for count in COUNTS]), loss_and_norm([sum(COUNTS)] * 2)
TINY = [[1.0, 2.0, 3.0], [4.0]]

# ------------------------------------------------------------------------------------------------- the statements

ORDER = [numpy.random.RandomState(epoch).permutation(6).tolist() for epoch in (0, 1)]
STREAM = [[[*ORDER[0], *ORDER[1]][4 * step + 2 * rank :][:2] for rank in range(2)] for step in range(3)]
RING = [[[block.value for block in row] for row in held] for held in replay(start_of(3), sends_of(3))]
LAYER = 3 * 14336 * 4096 + 2 * 4096**2 + 2 * 1024 * 4096 + 2 * 4096  # elements of Llama-3 8 B's
FIVE = {"ready": [5.0 * (i + 1) for i in range(5)], "elements": [3, 4, 2, 5, 1], "latency": 4.0, "per_second": 1.0}


def ring(n: float, ranks: int) -> float:
    """Seconds of an all-reduce of n bytes: 10 µs a message, 50 GB/s."""
    return 2 * (ranks - 1) * (10e-6 + n / ranks / 50e9)


def arrival(bucket_size: int) -> str:
    return f"{CHECKS.last_arrival(bucket_size=bucket_size, **FIVE):.0f}"


STATED = [
    f"needs {2 + 2 + 12} bytes for each parameter: 2 for the weight, 2 for its gradient, and {4 + 2 * 4} for the "
    "optimizer",
    f"Llama-3 70 B fills {16 * 70 / 80:.0f} GPUs",
    f"an all-gather of 12 bytes over 3 ranks has {3 - 1} steps of {12 // 3} bytes, so each rank sends "
    f"{CHECKS.bytes_sent('all_gather', 12, 3):.0f}.",
    f"10 bytes over 4 ranks make parts of {10 / 4}",
    f"8 ranks take {2 * (8 - 1)} steps, 1,000 ranks take {2 * (1000 - 1):,}",
    f"Here are {2**4} ranks with tp = cp = dp = pp = 2; rank 13 is framed",
    "Rank 13 has the coordinates " + ", ".join(f"{axis} {at}" for axis, at in coordinates(13).items()),
    f"because {1 + 2 * 0 + 4 * 1 + 8 * 1} = 1 + 2·0 + 4·1 + 8·1",
    f"Rank 13's tp group is {group_of(13, 'tp')}, its cp group is {group_of(13, 'cp')}, its dp group is "
    f"{group_of(13, 'dp')}.",
    "Rank 0 holds {}, rank 1 holds {}, and rank 2 holds {},".format(*(str(row)[1:-1] for row in RING[0])),
    f"In step 1 rank 0 sends its {RING[0][0][0]}, and rank 1 adds it to its {RING[0][1][0]}. In step 2 rank 1 sends "
    f"the {RING[1][1][0]}, and rank 2 adds it to its {RING[0][2][0]}: {RING[2][2][0]} is finished.",
    f"| own product | 3 · 2 = {3 * 2} | 3 · 5 = {3 * 5} | y = {3 * 2 + 3 * 5} |",
    f"the true gradient is {2 + 5} |",
    f"the products 6 and 15 become y = {6 + 15} on every rank",
    f"100 tensors of 1 MB on a ring of 1,024 GPUs cost 100 · {1000 * ring(1e6, 1024):.1f} ms, one of 100 MB costs "
    f"{1000 * ring(100e6, 1024):.1f} ms",
    f"The gradients are a: 1, b: 2 on rank 0 and a: 10, b: 20 on rank 1, so the sums are {1 + 10} and {2 + 20}.",
    f'who_reads( [("2 ranks", {STREAM})], num_samples=6',
    f"`consumed = 4` and rank 1 gives {STREAM[1][1]}, which are the first two of epoch 1",
    *(
        f"| {name} | {moment:.0f} s | {n} |"
        for name, moment, n in zip("edcba", FIVE["ready"], FIVE["elements"], strict=True)
    ),
    f"It leaves after 10 s, and its sum is there after 10 + 4 + 7 = {10 + 4 + 3 + 4} s. The last sum of the step is "
    f"there after {arrival(6)} s. With `bucket_size = 1` it would be {arrival(1)} s, and with 100, {arrival(100)} s.",
    f"32 layers of Llama-3 8 B, {4 * 32 * LAYER / 1e9:.0f} GB. The backward pass of 16,384 tokens takes "
    f"{4 * 32 * LAYER * 16384 / 400e12:.1f} s.",
    f"{max(40, 1024) * 1e6 * 4 / 1e9:.0f} GB of fp32 on 1,024",
    f"its {(1 << 21) * 4 >> 20} MiB of gradients",
    f"The gradient norm is too large by {100 * (WRONG[1] / RIGHT[1] - 1):.0f} percent",
    f"Rank 0 counts {COUNTS[0]} tokens and rank 1 counts {COUNTS[1]}",
    f"The mean of the means is (2 + 4) / 2 = {sum(sum(own) / len(own) for own in TINY) / 2:.0f}",
    f"The mean of all four is 10 / 4 = {sum(map(sum, TINY)) / 4}",
    f"the shares are 6/4 = {sum(TINY[0]) / 4} and 4/4 = {sum(TINY[1]) / 4:.0f}",
    f"64 / (4 · 2 · 2) = {CHECKS.answers(64, 4, 2, 2, 4, 1, 1.0, 1.0)['dp']}",
]


@pytest.mark.parametrize("stated", STATED)
def test_what_the_lab_states_is_so(stated: str) -> None:
    assert stated in TEXT


def test_the_loss_hides_what_the_gradient_shows() -> None:
    assert "differ by less than half a percent" in TEXT and abs(WRONG[0] / RIGHT[0] - 1) < 0.005
    assert "as much as five and a half of rank 0" in TEXT and round(2 * COUNTS[0] / COUNTS[1]) == 11
    assert "about six digits in fp32" in TEXT
    both = weights()
    total = sum(((losses_of(both, ids) * mask).sum() for ids, mask in BATCHES), torch.zeros(())) / sum(COUNTS)
    assert loss_and_norm([sum(COUNTS)] * 2)[0] == pytest.approx(total.item(), rel=2e-6)


def test_one_rank_never_sends_more_than_twice_the_tensor() -> None:
    assert "Each rank sends almost `2n` bytes for an all-reduce, and never more" in TEXT
    assert all(CHECKS.bytes_sent("all_reduce", 1, n) < 2 for n in (2, 8, 1000, 10**6))
    assert CHECKS.bytes_sent("all_reduce", 1, 1000) > 1.99


def test_an_all_to_all_sends_more_on_a_ring_than_straight_to_each_rank() -> None:
    assert "What it says for an all-to-all grows with N." in TEXT and "n(N-1)/N bytes, and the network" in TEXT
    on_the_ring = {n: CHECKS.bytes_sent("all_to_all", 1, n) for n in (3, 8, 64, 1000)}
    assert list(on_the_ring.values()) == sorted(set(on_the_ring.values()))
    assert all(sent > (n - 1) / n for n, sent in on_the_ring.items())


def test_the_timed_cell_has_the_sizes_of_its_text() -> None:
    found = re.search(r"LAYERS, SIZE, SECONDS = (\d+), 1 << (\d+), ([\d.]+)", TEXT)
    assert found
    layers, size, seconds = found.groups()
    assert (layers, size) == ("4", "21") and "each of four layers takes" in TEXT
    assert f"{1000 * float(seconds):.0f} ms, and the all-reduce" in TEXT


def test_the_code_of_section_6_is_the_code_of_this_file() -> None:
    for line in ("(0.95, 0.15)[of_rank]", "manual_seed(7)", ".mul(0.3)", "((64, 16), (16, 64))", "(4, 17)"):
        assert line in TEXT


def test_the_lab_does_not_give_the_ring_s_index_away() -> None:
    lab = SOURCE.read_text()
    before = lab[: lab.index("%%exercise ring_all_reduce")]
    assert "% N" not in before and "mod" not in before.replace("model", "").replace("module", "")
