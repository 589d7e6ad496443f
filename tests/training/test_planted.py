"""Sums that are missing or wrong in a run: the comparison of copies and that of the first step name what they spoil."""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import Any
from unittest import mock

import pytest

from minimegatron.comm import collectives
from minimegatron.errors import ConfigError, RankError
from minimegatron.layers import linear
from minimegatron.optim import clip, main_params
from minimegatron.parallel.data import ddp, finalize, grad_buffer
from minimegatron.training.arguments import parse_args
from tests.parallel.test_serial_twin import _MISTAKES
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import TINY, numbers, trainer_of

TP, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 2 --moe-ffn-hidden-size 16 --disable-bias-linear"
ZERO = "--use-distributed-optimizer --clip-grad 0.1"
LAYER = "decoder.layers.0."


def without_sum_of(part: str) -> Any:
    """Leave the gradients of parameters with this in their name out of the sums over tp."""
    real = finalize.sum_partial_gradients

    def sum_the_others(model: Any, mesh: Any) -> None:
        kept = {name: p.main_grad.clone() for name, p in model.params.items() if part in name}
        real(model, mesh)
        for name, grad in kept.items():
            model.params[name].main_grad.copy_(grad)

    return mock.patch.object(finalize, "sum_partial_gradients", sum_the_others)


def without_bucket_sums(axis: str) -> Any:
    """Gradients that travel over this axis do not."""
    real = grad_buffer.GradBuffer.finish

    def finish(self: Any) -> None:
        if self.axis.name != axis:
            real(self)

    return mock.patch.object(grad_buffer.GradBuffer, "finish", finish)


def without_fs_backward() -> Any:
    """A column-split matrix keeps its part of the gradient of its input to itself."""
    return mock.patch.object(linear, "reduce_dgrad", lambda dgrad, tp, sequence_parallel: collectives.Work(dgrad))


def twice_over_dp() -> Any:
    real = ddp.DistributedDataParallel.finish_grad_sync

    def finish(self: Any) -> None:
        real(self)
        real(self)

    return mock.patch.object(ddp.DistributedDataParallel, "finish_grad_sync", finish)


def norm_of_a_rank() -> Any:
    """Each rank clips by the norm of what it holds itself."""
    return mock.patch.object(clip, "all_reduce", lambda x, axis, op="sum": x)


def norms_counted_by_every_rank() -> Any:
    """What is replicated counts on every rank."""
    return mock.patch.object(main_params, "counts_here", lambda *_: True)


# What is planted -> (flags, the plant, tensor and axis that the copies show, tensor that the first step shows).
PLANTS: dict[str, tuple[str, Any, tuple[str, str] | None, str]] = {
    "norms": (SP, lambda: without_sum_of("pre_mlp_layernorm"), (f"{LAYER}pre_mlp_layernorm.weight", "tp"), "layernorm"),
    "row bias": (SP, lambda: without_sum_of("proj.bias"), (f"{LAYER}self_attention.linear_proj.bias", "tp"), "proj.b"),
    "positions": (SP, lambda: without_sum_of("position"), ("embedding.position_embeddings.weight", "tp"), "position"),
    "query norm": (
        TP,
        lambda: without_sum_of("q_layernorm"),
        (f"{LAYER}self_attention.q_layernorm.weight", "tp"),
        "q_",
    ),
    "f's backward": (
        TP,
        without_fs_backward,
        ("embedding.position_embeddings.weight", "tp"),
        "norm",
    ),
    "over dp": (
        "",
        lambda: without_bucket_sums("dp_cp"),
        ("embedding.word_embeddings.weight", "dp"),
        "final_layernorm",
    ),
    "over cp": (
        "--context-parallel-size 2",
        lambda: without_bucket_sums("dp_cp"),
        ("embedding.word_embeddings.weight", "cp"),
        "final_layernorm",
    ),
    "of experts": (EXPERTS, lambda: without_bucket_sums("edp"), (f"{LAYER}mlp.experts.", "edp"), "experts"),
    "of a tied weight": (
        "--pipeline-model-parallel-size 2",
        lambda: mock.patch.object(finalize, "sum_tied_gradients", lambda *_: None),
        ("embedding.word_embeddings.weight", "embd"),
        "word_embeddings",
    ),
    "row bias on every rank": (TP, _MISTAKES["row bias on every rank"], None, "final_layernorm"),
    "twice over dp": ("", twice_over_dp, None, "final_layernorm"),
    "own norm": (ZERO, norm_of_a_rank, ("the gradient norm of the step", "world"), "the norm of the gradient is"),
    "copies in the norm": (SP, norms_counted_by_every_rank, None, "the norm of the gradient is"),
    "nothing": (SP, contextlib.nullcontext, None, ""),
}


def with_plant(rank: int, world: int, plant: str, check: str) -> str:
    flags, mistake, _, _ = PLANTS[plant]
    line = f"--train-iters 1 --qk-layernorm --hidden-dropout 0 --attention-dropout 0 --global-batch-size 4 {flags}"
    with mistake():
        try:
            trainer_of(f"{line} {check}", world).train()
        except RankError as error:
            return f"{error.what}; {error.where}"
    return ""


@pytest.mark.parametrize(
    "plant",
    mostly_thorough(
        PLANTS, ["norms", "of experts", "own norm", "nothing"].__contains__, ["norms", "nothing"].__contains__
    ),
)
def test_copies_are_compared_over_every_axis(ranks: Any, plant: str) -> None:
    seen = PLANTS[plant][2]
    said = set(ranks(2).run(with_plant, plant, "--check-replicas-interval 1", timeout=60))
    if seen is None:
        assert said == {""}
        return
    assert len(said) == 1, "one error on all ranks"
    (text,) = said
    assert f"differ between copies over {seen[1]}, first '{seen[0]}" in text and f"; axis {seen[1]}, ranks 0-1" in text


@pytest.mark.parametrize(
    "plant", mostly_thorough(PLANTS, ["row bias on every rank", "own norm"].__contains__, ["own norm"].__contains__)
)
def test_the_first_step_is_held_against_one_process(ranks: Any, plant: str) -> None:
    seen = PLANTS[plant][3]
    said = set(ranks(2).run(with_plant, plant, "--check-first-step", timeout=60))
    assert len(said) == 1, "one error on all ranks"
    (text,) = said
    if not seen:
        assert text == ""
        return
    if seen.startswith("the norm"):
        assert f"the first step: {seen}" in text and " in one process" in text and re.search(r"on ranks? \d", text)
        return
    assert "gradients are not those of one process; seen from the loss, the first is '" in text
    assert seen in text.partition("the first is '")[2], text
    assert ("lm loss is" in text) == (plant == "row bias on every rank"), text


LAYOUTS = [
    f"{SP} --bf16",
    "--pipeline-model-parallel-size 2 --overlap-grad-reduce",
    f"{EXPERTS} --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.1",
    "--context-parallel-size 2 --hidden-dropout 0.2 --attention-dropout 0",
    f"{EXPERTS} {SP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 --mtp-num-layers 1",
]


def both_checks(rank: int, world: int, line: str) -> Any:
    trainer = trainer_of(f"--train-iters 2 --check-replicas-interval 1 --global-batch-size 4 {line}", world)
    trainer.train()
    return numbers(trainer.history)


@SLOW
@pytest.mark.parametrize("line", mostly_thorough(LAYOUTS, [1, 4]))
def test_right_sums_pass_and_the_check_leaves_no_trace(ranks: Any, line: str) -> None:
    checked = ranks(2).run(both_checks, f"{line} --check-first-step", timeout=90)
    assert checked == ranks(2).run(both_checks, line, timeout=90)


def test_the_check_says_how_close_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of("--train-iters 1 --check-first-step")
    trainer.metrics.speaks = True
    trainer.train()
    said = capsys.readouterr().out.splitlines()[0]
    assert (
        said == "28 gradients, their norm and the loss of the first step are those of one process "
        "(largest difference 0e+00, in fp64)"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-layers 50 --hidden-size 512 --global-batch-size 512", "FLOP in fp64 on one rank"),
        (f"--moe-input-jitter-eps 0.1 {EXPERTS}", "check_first_step with moe_input_jitter_eps"),
        ("--fp8-format e4m3 --bf16", "check_first_step with fp8_format"),
    ],
)
def test_what_one_process_cannot_repeat_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_args(shlex.split(f"{TINY} --mock-data --check-first-step {flags}"))
