"""What a layer and a step cost the host: launches, and moments at which it waits for the GPU.

The problem in a sentence: one `.item()` in a layer costs nothing on a CPU and empties a GPU's queue in every layer of
every microbatch, and nobody sees it.

Counts are linear in layers l and in microbatches m, so four short runs with l and m of 1 and 2 give them all:

    in the passes       a + b m + e l + c l m       c: a layer and microbatch      b: embedding and loss
    outside             d + f l                     e + f: a layer and step        a + d: a step

A row of `BUDGETS` is the most that a change may cost, and why it costs that; whoever makes it cheaper lowers the row.
An ordinary run leaves out FP8.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.rehearsal import rehearse
from tests.rehearsal.cases import LLAMA, MOE
from tests.rehearsal.record import Record
from tests.thorough import mostly_thorough

pytestmark = pytest.mark.timeout(900)
# Kernels are emulated thread by thread, and counts do not depend on sizes.
FEW = " --bf16 --seq-length 16 --micro-batch-size 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 32"
LINES = {
    "dense": LLAMA + FEW,
    "moe": MOE + FEW,
    "fp8": LLAMA + FEW + " --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "tensorwise": LLAMA + FEW + " --fp8-format hybrid --fp8-recipe tensorwise",
}
LAYER, MICROBATCH = "a layer and microbatch", "a microbatch"
LAYER_STEP, STEP = "a layer and step", "a step"
DATA = "training/datasets.py"


@dataclasses.dataclass(frozen=True)
class Budget:
    """At most `most` of `what` for each `unit`.

    Attributes:
        line: a key of `LINES`.
        what: "waits" or "launches".
        unit: see the module docstring.
        most: the limit.
        why: what they are.
    """

    line: str
    what: str
    unit: str
    most: int
    why: str


BUDGETS = [
    Budget("dense", "waits", LAYER, 0, "nothing in a layer is decided by the host"),
    Budget("dense", "waits", MICROBATCH, 0, "embedding and loss neither; the data's copies have a row of their own"),
    Budget("dense", "waits", STEP, 2, "losses, tokens and requests to stop in one message; the norm in another"),
    Budget("dense", "waits", LAYER_STEP, 0, "the optimizer reads a table"),
    Budget("dense", "launches", LAYER, 34, "12 products, 11 fused kernels, attention, 6 sums into gradients, 4 others"),
    Budget("dense", "launches", MICROBATCH, 48, "batch, embedding, rotary angles, last norm, logits, loss"),
    Budget("dense", "launches", LAYER_STEP, 0, "one table for all parameters"),
    Budget("dense", "launches", STEP, 28, "norm, AdamW, zeroing, sums of losses: a few launches each"),
    Budget("moe", "waits", LAYER, 1, "the counts of tokens, which size the messages and products; none in backward"),
    Budget("moe", "waits", MICROBATCH, 0, "as dense"),
    Budget("moe", "waits", STEP, 2, "as dense; loads of experts come with the losses"),
    Budget("moe", "waits", LAYER_STEP, 0, "loads of all layers come together"),
    Budget("moe", "launches", LAYER, 120, "a loop over 4 experts (33 products), routing and its gradient"),
    Budget("moe", "launches", LAYER_STEP, 3, "its load of experts"),
    Budget("fp8", "waits", LAYER, 0, "scales stay on the GPU"),
    Budget("fp8", "waits", MICROBATCH, 0, "as dense"),
    Budget("fp8", "waits", STEP, 2, "as dense"),
    Budget("fp8", "waits", LAYER_STEP, 0, "scales of all layers move together"),
    Budget("fp8", "launches", LAYER, 42, "as dense, and a cast for each of 3 tensors of 4 matrices"),
    Budget("fp8", "launches", STEP, 41, "as dense, and about ten that move all scales at once"),
    Budget("fp8", "launches", LAYER_STEP, 4, "each of its weights is cast once; one tensor holds all scales"),
    Budget("tensorwise", "waits", LAYER, 0, "scales stay on the GPU"),
    Budget("tensorwise", "launches", LAYER, 50, "as dense, and two for each of 3 tensors of 4 matrices"),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """(line, layers, microbatches) -> the record of its second step; of the lines that this run of tests asks for."""
    tests = [item.name for item in request.session.items if item.nodeid.startswith(request.node.nodeid)]
    cases = {
        f"{name} {layers} {micro}": {"alone": f"{line} --num-layers {layers} --global-batch-size {micro}"}
        for name, line in LINES.items()
        if any(f"[{name}" in test for test in tests)
        for layers in (1, 2)
        for micro in (1, 2)
    }
    path = tmp_path_factory.mktemp("budgets") / "cases.json"
    path.write_text(json.dumps(cases))
    result = rehearse("tests.rehearsal.training", args=[str(path)], timeout=800)
    failed = {name: one["error"] for name, one in result.report.items() if "error" in one}
    assert not failed, failed
    return {name: Record.from_json(one["record"]) for name, one in result.report.items()}


def measured(runs: dict[str, Record], line: str, what: str) -> dict[str, int]:
    """Unit -> count, from the four runs; what reads data is left out."""

    def count(layers: int, micro: int, phase: str) -> int:
        record = runs[f"{line} {layers} {micro}"]
        return record.count(what, phase) - record.count(what, phase, DATA)

    def passes(layers: int, micro: int) -> int:
        return count(layers, micro, "passes")

    with_layer, with_micro = passes(2, 1) - passes(1, 1), passes(1, 2) - passes(1, 1)
    layer = passes(2, 2) - passes(1, 2) - with_layer
    layer_step = with_layer - layer + count(2, 1, "step") - count(1, 1, "step")
    return {
        LAYER: layer,
        MICROBATCH: with_micro - layer,
        LAYER_STEP: layer_step,
        STEP: passes(1, 1) + count(1, 1, "step") - with_micro - layer_step,
    }


@pytest.mark.parametrize(
    "row",
    mostly_thorough(BUDGETS, lambda row: row.line in ("dense", "moe"), lambda row: row.line == "dense"),
    ids=lambda row: f"{row.line}: {row.what} of {row.unit}",
)
def test_budget(runs: dict[str, Record], row: Budget) -> None:
    found = measured(runs, row.line, row.what)
    phase = "passes" if row.unit in (LAYER, MICROBATCH) else "step"
    table = runs[f"{row.line} 2 1"].table(row.what, phase)
    assert found[row.unit] <= row.most, (
        f"{row.line}: {found[row.unit]} {row.what} of {row.unit}, the budget is {row.most} ({row.why}).\n"
        f"All, with 2 layers and 1 microbatch:\n{table}"
    )


@pytest.mark.parametrize("line", mostly_thorough(LINES, ["dense", "moe"].__contains__, ["dense"].__contains__))
def test_a_microbatch_is_copied_without_a_wait(runs: dict[str, Record], line: str) -> None:
    """From pinned memory, so the host waits for none of its tensors."""
    copies = runs[f"{line} 1 2"].count("waits", "passes", DATA) - runs[f"{line} 1 1"].count("waits", "passes", DATA)
    assert copies == 0
