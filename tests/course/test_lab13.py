"""Lab 13's checks: what the judge takes for right is what the package keeps, scans and cuts."""

from __future__ import annotations

from importlib import import_module
from itertools import combinations

import pytest
import torch

from labkit.exercises import Draw
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.ssm.mixer import MambaMixer
from minimegatron.layers.ssm.scan import Scan, step
from minimegatron.models.families import preset

FORMS, KEPT, RANKS, STAGES = (
    import_module(f"course.13_state_space.checks.{name}") for name in ("forms", "kept", "ranks", "stages")
)
NEMOTRON = TransformerConfig.from_dict(preset("nemotron-h-8b"))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_reference_of_the_forms_is_the_scan_of_the_package(size: int) -> None:
    given = FORMS._double(FORMS._drawn(Draw(1), 13, "h"))
    x, dt, A, B, C, h = given.values()
    scan = Scan(x[:, None], dt[:, None], (dt * A)[:, None], B[:, None, None], C[:, None, None], size)
    y, last = scan.outputs(h[None])
    want, state = FORMS.written_out(**given)
    torch.testing.assert_close(y[:, 0], want)
    torch.testing.assert_close(last[0], state)
    one, _ = step(x[:1], dt[:1], (dt * A)[:1], B[:1, None], C[:1, None], h[None])
    torch.testing.assert_close(one, want[:1])


def test_the_reference_between_ranks_is_what_a_scan_of_pieces_hands_on() -> None:
    given = FORMS._double(FORMS._drawn(Draw(2), 12))
    x, dt, A, B, C = given.values()
    ranks = []
    for part in range(4):
        cut = slice(3 * part, 3 * part + 3)
        scan = Scan(x[cut, None], dt[cut, None], (dt * A)[cut, None], B[cut, None, None], C[cut, None, None], 2)
        own, decay = scan.summary()
        ranks.append({"own": own[0], "decay": decay[0]})
    nothing = x.new_zeros(*x.shape[1:], B.shape[1])
    for part, h in enumerate(RANKS.state_before(ranks)[1:], 1):
        to = 3 * part
        state = FORMS.written_out(x[:to], dt[:to], A, B[:to], C[:to], nothing)[1]
        torch.testing.assert_close(h, state)


def test_the_package_keeps_the_bytes_that_are_predicted() -> None:
    with torch.device("meta"):
        kept = MambaMixer(NEMOTRON, Mesh.serial()).inference_state()
    size = {"conv": 2, "ssm": 4}
    found = sum(torch.Size(spec.shape).numel() * size[name] for name, spec in kept.items())
    assert found == KEPT.kept_bytes("M", 1, KEPT._NEMOTRON)["M"]
    sizes = KEPT._NEMOTRON
    assert (sizes["groups"], sizes["d"]) == (NEMOTRON.num_query_groups, NEMOTRON.kv_channels)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_slowest_stage_is_that_of_all_cuts(seed: int) -> None:
    inputs = STAGES._some(Draw(seed))
    pattern, costs, p = inputs["pattern"][:10], inputs["costs"], min(inputs["p"], 5)
    cuts = (
        [pattern[a:b] for a, b in zip((0, *borders), (*borders, len(pattern)), strict=True)]
        for borders in combinations(range(1, len(pattern)), p - 1)
    )
    assert STAGES.least(pattern, costs, p) == min(max(STAGES.loads(cut, costs)) for cut in cuts)


def test_the_patterns_of_the_lab_are_the_models() -> None:
    assert NEMOTRON.hybrid_override_pattern == STAGES._NEMOTRON and len(STAGES._NEMOTRON) == 52
