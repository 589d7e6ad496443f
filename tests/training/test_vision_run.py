"""A model that sees goes on in other layouts: encoder, projector, decoder and their moments are cut again."""

from __future__ import annotations

import pytest

from tests.posttraining.test_tasks import near
from tests.posttraining.test_vlm import CLIP, MODEL, curve
from tests.thorough import SLOW, mostly_thorough

LAYOUTS = [
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"),
    (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
    (2, "--micro-batch-size 2 --data-parallel-sharding-strategy optim_grads_params"),
    (1, "--micro-batch-size 8"),
]


@SLOW
@pytest.mark.parametrize("model", mostly_thorough([MODEL, CLIP], [0]), ids=["qwen", "clip"])
def test_a_run_goes_on_in_other_layouts(ranks, tmp_path, model):
    """A step in each, the curve of one rank; that no element takes another's place: `test_reshard`."""
    line = f"--examples drawn --corpus-path {tmp_path} --train-iters {len(LAYOUTS)}"
    whole = curve(0, 1, f"{line} --micro-batch-size 8", model)
    line += f" --exit-interval 1 --save {tmp_path / 'run'}"
    for step, (world, layout) in enumerate(LAYOUTS):
        goes_on = f"--load {tmp_path / 'run'}" if step else ""
        for found in ranks(world).run(curve, f"{line} {layout} {goes_on}", model):
            near(found, whole[step : step + 1])
