"""Every operation of torch.distributed gives over the broker what it gives over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.labkit import talks
from tests.labkit.lines import Ranks
from tests.thorough import mostly_thorough

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module", params=mostly_thorough([2, 4], [1]))
def both(request: pytest.FixtureRequest, ranks: Ranks) -> tuple[list[Any], list[Any], dict[str, Any]]:
    ours, evidence = ranks.run("tests.labkit.talks:every", request.param)
    theirs, _ = ranks.run("tests.labkit.talks:every", request.param, "gloo")
    return ours, theirs, evidence


@pytest.mark.parametrize("name", talks.TALKS)
def test_it_is_as_over_gloo(both: tuple[list[Any], list[Any], Any], name: str) -> None:
    for rank, (ours, theirs) in enumerate(zip(both[0], both[1], strict=True)):
        assert isinstance(ours, dict), ours
        assert isinstance(theirs, dict), theirs
        _equal(ours[name], theirs[name], f"rank {rank}")


def _equal(one: Any, other: Any, where: str) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor), f"{where}: {one}"
        assert one.dtype == other.dtype and one.shape == other.shape, where
        low = other.dtype in (torch.float16, torch.bfloat16)
        torch.testing.assert_close(one, other, rtol=1e-2 if low else 1e-6, atol=0.0, msg=f"{where}: {one} {other}")
    elif isinstance(other, list | tuple):
        assert isinstance(one, list | tuple) and len(one) == len(other), f"{where}: {one} {other}"
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            _equal(a, b, f"{where}[{i}]")
    elif isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in other:
            _equal(one[key], other[key], f"{where}[{key!r}]")
    else:
        assert one == other, where
