"""Families with parts of their own, from their presets by flags alone: trained, saved, continued elsewhere, planned."""

from __future__ import annotations

import pytest

from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.planning import plan
from minimegatron.training.arguments import parse_args
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import TINY, history_on_rank, numbers

SMALL = "--num-layers 2 --num-attention-heads 4 --kv-channels 8 --ffn-hidden-size 24 --window-size 4,0"
PRESETS = {
    "gpt-oss-20b": f"{SMALL} --num-query-groups 2 --num-experts 4 --moe-router-topk 2",
    "gemma3-4b": f"{SMALL} --num-query-groups 1 --window-attn-skip-freq 2",
}
STEPS = "--micro-batch-size 1 --global-batch-size 4 --lr-decay-iters 4 --train-iters 4"
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"


@SLOW
@pytest.mark.parametrize("preset", mostly_thorough(PRESETS, [0]))
def test_a_run_goes_on_in_another_layout(ranks, tmp_path, preset):
    line = f"--preset {preset} {PRESETS[preset]} {STEPS}"
    whole = numbers(ranks(2).run(history_on_rank, f"{line} {TP2} --save {tmp_path} --save-interval 2")[0])
    assert whole[3][0] < whole[0][0]
    resumed = numbers(ranks(2).run(history_on_rank, f"{line} {PP2} --load {tmp_path} --ckpt-step 2")[0])
    assert len(resumed) == 2
    for (loss, norm), (want, want_norm) in zip(resumed, whole[2:], strict=True):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(want_norm, rel=1e-4)


@pytest.mark.parametrize("preset", mostly_thorough(PRESETS, [0]))
def test_it_is_planned(preset):
    layout = f"{TP2} {PP2} --context-parallel-size 2"
    line = f"{TINY} --mock-data --preset {preset} {PRESETS[preset]} {STEPS} --bf16 {layout}"
    told = plan(parse_args(line.split(), 8), 8, CLUSTERS["h100"])
    assert told.bytes > 0 and not any(memory.unknown for memory in told.memory.values())
