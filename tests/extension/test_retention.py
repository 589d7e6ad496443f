"""A mixer and a model in one file outside of the package: trained, saved, resharded, planned, and asked to generate.

Its memory is predicted and counted in `tests/training/test_memory_plan.py`.
"""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError, RankError
from minimegatron.inference.engine import Engine
from minimegatron.inference.generate import generate
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.decoder import GPTModel, build_model
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.planning import plan
from minimegatron.training.arguments import parse_args
from tests.extension.retention import asking, layers
from tests.inference.ranked import LENGTH, PROMPTS, VOCABULARY, ids, in_pieces, pages_of
from tests.inference.test_pages import after_prompts
from tests.recorder import OnACpu
from tests.training.test_trainer import TINY, history_on_rank, numbers
from tests.twin import Case, compare_all, problems

SPEC = ("tests.extension.retention", "layers")
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full"}
CASES = [
    Case(TP2, double=True, spec=SPEC),
    Case(TP2 | {"sequence_parallel": True}, FULL, double=True, spec=SPEC, documents=True),
    Case(PP2, double=True, accumulation=3, spec=SPEC),
    Case(PP2 | {"pipeline_schedule": "zb_h1"}, double=True, accumulation=3, spec=SPEC),
    Case(sharding="optim", double=True, accumulation=2, spec=SPEC),
    Case(PP2, double=True, accumulation=3, spec=("tests.extension.retention", "skipping")),
]


def test_every_gradient_is_that_of_one_process(ranks):
    for reports in ranks(2).run(compare_all, CASES):
        for case, report in zip(CASES, reports, strict=True):
            assert any("decay" in name for name in report["grads"])
            assert problems(report, 1e-9) == [], case.layout


def cut(rank: int, world: int) -> None:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
    config = Case().config
    build_model_chunks(config, mesh, 0, layers(config))


def test_context_parallelism_is_refused_by_its_name(ranks):
    said = "layer 0 has a Retention, which does not say that it can share a sequence over cp"
    with pytest.raises(RankError, match=said):
        ranks(2).run(cut)


def test_a_run_goes_on_in_another_layout(ranks, tmp_path):
    line = "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --lr-decay-iters 4 --hidden-dropout 0"
    line += f" --spec {' '.join(SPEC)}"
    tp2, pp2 = f"{line} --tensor-model-parallel-size 2", f"{line} --pipeline-model-parallel-size 2"
    whole = numbers(ranks(2).run(history_on_rank, f"{tp2} --train-iters 4 --save {tmp_path} --save-interval 2")[0])
    resumed = numbers(ranks(2).run(history_on_rank, f"{pp2} --train-iters 4 --load {tmp_path} --ckpt-step 2")[0])
    assert len(resumed) == 2
    for (loss, norm), (want, want_norm) in zip(resumed, whole[2:], strict=True):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(want_norm, rel=1e-4)


def model_of(**fields: int) -> GPTModel:
    """A model of three layers of it, in fp64."""
    config = Case(model={"num_layers": 3, "vocab_size": VOCABULARY, **fields}).config
    return build_model(config, Mesh.serial(), 1, layers(config)).eval().double()


def test_it_generates_from_its_own_state():
    model, tokens = model_of(), ids(2, LENGTH)
    with torch.no_grad():
        assert (in_pieces(model, tokens) - model.full_logits(tokens)).abs().max() <= 1e-12
    assert pages_of(model, 3, 16)[0].nbytes == 2 * pages_of(model, 1, 400)[0].nbytes, "room for a sequence, not a token"
    together = after_prompts(model, PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        assert (together[i] - after_prompts(model, [prompt], torch.nan)[0]).abs().max() <= 1e-12, "a neighbour is seen"
    for prompt, made in zip(PROMPTS, generate(model, PROMPTS, 9), strict=True):
        with torch.no_grad():
            logits = model.full_logits(torch.tensor([prompt + made.tokens]))[0, len(prompt) - 1 : -1]
        assert made.tokens == logits.argmax(-1).tolist()


def test_its_step_is_recorded():
    played = generate(Engine(model_of(), recorder=OnACpu()), PROMPTS, 9)
    assert [c.tokens for c in played] == [c.tokens for c in generate(model_of(), PROMPTS, 9)]


def test_a_state_that_is_inherited_is_not_trusted():
    config = Case().config
    model = build_model(config, Mesh.serial(), 1, asking(config)).eval()
    with pytest.raises(ConfigError, match="self_attention of layer 0 is a Asking, which does not say what it keeps"):
        generate(model, [[1]], 1)


def test_both_are_planned():
    line = [*TINY.split(), "--mock-data", "--num-layers", "2", "--pipeline-model-parallel-size", "2"]
    planned = []
    for name in ("layers", "skipping"):
        told = plan(parse_args([*line, "--spec", "tests.extension.retention", name], 2), 2, CLUSTERS["h100"])
        assert not any(memory.unknown for memory in told.memory.values())
        planned.append(told.bytes)
    assert planned[1] > planned[0] > 0, "the second tensor between the stages is memory, too"
