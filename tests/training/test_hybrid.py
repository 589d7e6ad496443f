"""A hybrid from the command line: trained, saved, gone on with in other layouts, published, and asked to generate."""

from __future__ import annotations

import pytest
import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main as convert
from minimegatron.inference.generate import generate
from minimegatron.inference.loading import load
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.planning import plan
from minimegatron.training.arguments import parse_args
from tests.thorough import mostly_thorough
from tests.training.test_trainer import TINY, history_on_rank, numbers

LINE = (
    "--preset nemotron-h-8b --hybrid-override-pattern M*-M --num-layers 4 --num-query-groups 2 --kv-channels 8 "
    "--ffn-hidden-size 48 --mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 6 "
    "--micro-batch-size 1 --global-batch-size 4 --lr-decay-iters 4"
)
NEXT = (
    "--preset qwen3-next-80b-a3b --num-layers 4 --num-query-groups 2 --kv-channels 16 --ffn-hidden-size 48 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr-decay-iters 4"
)
TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize("flags", mostly_thorough([LINE, NEXT], [0]), ids=["mamba", "delta"])
def test_a_run_goes_on_in_other_layouts_and_is_published(ranks, tmp_path, flags):
    """Two steps on one rank, the third over tp, the fourth in a pipeline; what transformers reads: `test_export`."""
    whole = numbers(history_on_rank(0, 1, f"{flags} --train-iters 4"))
    assert whole[-1][0] < whole[0][0]
    line = f"{flags} --save-interval 1 --save {tmp_path / 'run'}"
    history_on_rank(0, 1, f"{line} --train-iters 2")
    line += f" --load {tmp_path / 'run'}"
    parts = [
        numbers(ranks(2).run(history_on_rank, f"{line} --train-iters {steps} {layout}")[0])
        for steps, layout in ((3, TP2), (4, PP2))
    ]
    for (loss, norm), (want, want_norm) in zip((*parts[0], *parts[1]), whole[2:], strict=True):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(want_norm, rel=1e-4)
    convert(["--load", str(tmp_path / "run"), "--save", str(tmp_path / "hf"), "--to", "hf", "--hf-model", "none"])
    models = [load(open_model(tmp_path / name), Mesh.serial(), "fp32") for name in ("run", "hf")]
    prompt = list(range(20))
    (made,), (again,) = (generate(model, [prompt], 6) for model in models)
    with torch.no_grad():
        words = models[0].full_logits(torch.tensor([prompt + made.tokens]))[0, len(prompt) - 1 : -1].argmax(-1)
    assert made.tokens == again.tokens == words.tolist()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("flags", mostly_thorough([LINE, NEXT], [0]), ids=["mamba", "delta"])
def test_it_is_planned(flags):
    line = [*TINY.split(), "--mock-data", *flags.split(), *TP2.split()]
    told = plan(parse_args(line, 2), 2, CLUSTERS["h100"])
    assert not any(memory.unknown for memory in told.memory.values()) and told.bytes > 0
