"""Megatron-Core still gives the frozen numbers, and the frozen numbers are the published ones.

The subjects that need no ranks are asked again here; the training traces take two minutes:
`python -m tests.oracle.regenerate --only gpt --check`.
"""

from __future__ import annotations

import pytest
import torch

from tests import golden
from tests.oracle import megatron_cpu, regenerate


@pytest.mark.parametrize("subject", ["groups", "schedule", "scaler", "microbatches", "slots"])
@pytest.mark.filterwarnings("ignore")
def test_megatron_still_says_what_is_frozen(subject: str) -> None:
    pytest.importorskip("megatron.core", reason="the oracle is optional: pip install --no-deps megatron-core==0.16.1")
    assert not regenerate.differences(golden.load(subject), regenerate.regenerate(subject))


def test_differences_are_found_and_located() -> None:
    frozen = {"made_by": 1, "a": [{"x": 1.0}, {"x": 2.0}], "b": 3}
    assert regenerate.differences(frozen, {**frozen, "made_by": 2}) == []
    assert regenerate.differences(frozen, {**frozen, "a": [{"x": 1.0}, {"x": 2.5}]}) == ["/a/1/x: frozen 2.0, now 2.5"]
    assert regenerate.differences(frozen, {**frozen, "a": [{"x": 1.0}]})[0].startswith("/a: frozen")
    assert regenerate.differences(frozen, {"made_by": 1, "a": frozen["a"]}) == ["/b: frozen 3, now None"]


def test_cuda_means_cpu_only_inside_the_context() -> None:
    with megatron_cpu.CudaMeansCpu():
        x = torch.zeros(2, device="cuda").cuda().to("cuda:0")
        assert x.device.type == "cpu"
        assert x.type() == "torch.cuda.FloatTensor"
    assert x.type() == "torch.FloatTensor"
