"""Mistakes planted into runs: `compare`, `--twice` and the replay of a bad step name the rank and the place.

Each row is one mistake of a kind that has cost somebody a training, planted into a real run on two ranks. A tool must
name the module, the pass and the ranks; a tool that names nothing, or another place, fails the row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from minimegatron.comm.axis import Axis
from minimegatron.commands import compare as command
from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from minimegatron.data.tokenizer import ByteTokenizer
from minimegatron.errors import BadStep, ConfigError, RankError
from minimegatron.layers import linear, logical
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.moe.permutation import Reorder
from minimegatron.layers.param import logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.data import finalize
from minimegatron.training import build
from minimegatron.training.arguments import parse_args
from minimegatron.training.comparison.findings import Comparison
from minimegatron.training.comparison.twice import twice
from minimegatron.training.comparison.twin import compare_with_twin
from minimegatron.training.comparison.verdict import verdict
from minimegatron.training.rerun import origin
from minimegatron.training.step import forward_step as plain_step
from minimegatron.training.task import Task
from tests.mock_data import few_documents
from tests.parallel.test_serial_twin import _MISTAKES
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_planted import EXPERTS, SP, TP, twice_over_dp, without_bucket_sums, without_sum_of
from tests.training.test_trainer import TINY, trainer_of

CP, PP = "--context-parallel-size 2 --attention-dropout 0", "--pipeline-model-parallel-size 2"
EP = f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
Plant = Callable[[int], Any]  # rank -> context in which the mistake is made


def on_rank_one(target: Any, name: str, change: Callable[[Callable[..., Any]], Any]) -> Plant:
    """A function that does something else on rank 1."""

    def plant(rank: int) -> Any:
        real = getattr(target, name)
        return mock.patch.object(target, name, change(real)) if rank == 1 else contextlib.nullcontext()

    return plant


def everywhere(mistake: Callable[[], Any]) -> Plant:
    return lambda rank: mistake()


def row_sum_left_out() -> Any:
    """The attention's output projection keeps its part of the sum."""
    real = linear.RowParallelLinear.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.weight.shape[0] == x.shape[-1] * self.tp.size and self.tp.size > 1:
            return linear.linear(x, self.weight) + (0.0 if self.bias is None else self.bias)
        return real(self, x)

    return mock.patch.object(linear.RowParallelLinear, "forward", forward)


def another_seed(real: Any) -> Any:
    return lambda name, layout, seed: real(name, layout, seed + 1)


def equal_shards() -> Any:
    """Every tp rank draws the first part of a matrix."""
    real = logical.draw_part

    def draw(name: str, layout: Any, seed: int) -> torch.Tensor:
        return real(name, dataclasses.replace(layout, rank=0), seed)

    return mock.patch.object(logical, "draw_part", draw)


def stale_block() -> Any:
    """The ring's second block is the first one once more."""

    def circulate(block: torch.Tensor, axis: Axis, visit: Callable[[int, torch.Tensor], None]) -> None:
        for step in range(axis.size):
            visit((axis.rank - step) % axis.size, block)

    return mock.patch.multiple("minimegatron.layers.attention.context_parallel", circulate=circulate)


def local_counts() -> Any:
    """Gradients are divided by the tokens of the rank."""
    return mock.patch.object(finalize, "all_reduce", lambda x, axis, op="sum": x)


def upside_down(real: Any) -> Any:
    """Rows that have arrived for the experts are in the wrong order."""
    return lambda self, x: real(self, x).flip(0) if x.dim() == 2 else real(self, x)


def stale_input(real: Any) -> Any:
    """The second stage computes with the first microbatch's input all the time."""
    kept: list[Any] = []

    def set_input_tensor(self: Any, inputs: Any) -> None:
        if inputs is not None:
            kept.append({n: t.detach().clone().requires_grad_() for n, t in inputs.items()})
            own = {n: t * 0 + kept[0][n] for n, t in inputs.items()}
            inputs = own
        real(self, inputs)

    return set_input_tensor


def backward_off(real: Any) -> Any:
    """The gradient of the queries is 1 % too large in the core of attention."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * 1.01

    return lambda self, q, k, v, mask: real(self, Off.apply(q), k, v, mask)


# Mistake -> (flags, plant, pass, name of the first tensor, ranks).
COMPARED: dict[str, tuple[str, Plant, str, str, tuple[int, ...]]] = {
    "nothing": (SP, lambda rank: contextlib.nullcontext(), "", "", ()),
    "a sum over tp left out": (
        TP, everywhere(row_sum_left_out), "forward", "decoder.layers.0.self_attention.linear_proj", (0, 1)),
    "a bias on every rank": (
        TP, everywhere(_MISTAKES["row bias on every rank"]), "forward", "decoder.layers.0.self_attention.linear_proj",
        (0, 1)),
    "another seed on a rank": (
        "", on_rank_one(logical, "draw_part", another_seed), "forward", "embedding.word_embeddings", (1,)),
    "equal shards": (TP, everywhere(equal_shards), "forward", "embedding.word_embeddings", (0, 1)),
    "a stale block in the ring": (
        CP, everywhere(stale_block), "forward", "decoder.layers.0.self_attention.core_attention", (0, 1)),
    "rows of experts out of order": (
        EP, on_rank_one(Reorder, "there", upside_down), "forward", "decoder.layers.0.mlp.experts", (1,)),
    "a stale input of a stage": (
        f"{PP} --global-batch-size 4", on_rank_one(GPTModel, "set_input_tensor", stale_input), "forward",
        "decoder.layers.1.input_layernorm", (1,)),
    "a backward pass of a rank": (
        TP, on_rank_one(CoreAttention, "forward", backward_off), "gradient",
        "decoder.layers.1.self_attention.q_layernorm", (1,)),
    "f's backward": (
        TP, everywhere(lambda: mock.patch.object(linear, "reduce_dgrad", lambda dgrad, tp, sp: linear.c.Work(dgrad))),
        "gradient", "decoder.final_layernorm", (0, 1)),
    "a sum of norms over tp": (
        SP, everywhere(lambda: without_sum_of("layers.1.pre_mlp_layernorm")), "parameter",
        "decoder.layers.1.pre_mlp_layernorm.bias", (0, 1)),
    "the sum over dp": ("", everywhere(lambda: without_bucket_sums("dp_cp")), "parameter", "final_layernorm", (0, 1)),
    "the sum over cp": (CP, everywhere(lambda: without_bucket_sums("dp_cp")), "parameter", "final_layernorm", (0, 1)),
    "the sum of experts": (EXPERTS, everywhere(lambda: without_bucket_sums("edp")), "parameter", "experts", (0, 1)),
    "twice over dp": ("", everywhere(twice_over_dp), "parameter", "final_layernorm", (0, 1)),
    "the count of a rank": ("", everywhere(local_counts), "parameter", "final_layernorm", (0, 1)),
    "doubled on a rank": (
        TP, on_rank_one(finalize, "sum_partial_gradients", lambda real: _doubling(real)), "parameter",
        "decoder.layers.1.mlp.linear_fc1.weight", (1,)),
}  # fmt: skip


def _doubling(real: Any) -> Any:
    def sums(model: Any, mesh: Any) -> None:
        real(model, mesh)
        for name, param in model.params.items():
            if name == "decoder.layers.1.mlp.linear_fc1.weight":
                param.main_grad.mul_(2)

    return sums


def compared(rank: int, world: int, line: str, mistake: str | None = None, **options: Any) -> Comparison:
    """The comparison of a layout with one process, while the mistake is made."""
    norms = "" if "--multi-latent" in line else "--qk-layernorm"
    flags = f"{norms} --global-batch-size 2 {line}" if "global-batch" not in line else f"{norms} {line}"
    trainer = trainer_of(f"--num-layers 2 {flags}", world)
    batch = trainer.batch_sizes.global_batch_size_at(0)
    with contextlib.nullcontext() if mistake is None else COMPARED[mistake][1](rank):
        return compare_with_twin(trainer.run, trainer.mesh, trainer.train_set, batch, trainer.forward_step, **options)


QUICK = ["nothing", "a sum over tp left out", "a backward pass of a rank"]


@pytest.mark.parametrize("mistake", mostly_thorough(COMPARED, QUICK.__contains__, QUICK[:2].__contains__))
def test_the_first_tensor_that_differs_is_named(ranks: Any, mistake: str) -> None:
    line, _, phase, name, wrong = COMPARED[mistake]
    results = ranks(2).run(compared, line, mistake, timeout=90)
    assert results[0] == results[1], "the same on all ranks"
    first = results[0].first
    assert not results[0].left_out
    if not phase:
        assert first is None and max(d.distance for d in results[0].differences) < 1e-9
        return
    assert first is not None
    assert (first.phase, first.ranks) == (phase, wrong) and name in first.name, verdict(results[0])
    what, where, fix = verdict(results[0])
    assert name in what and fix and ("rank" in where)
    doubled = ("twice over dp", "the count of a rank", "doubled on a rank")
    assert ("it is 2 times the reference" in what) == (mistake in doubled), what


LAYOUTS = [
    (2, f"{SP} --swiglu"),
    (2, f"{CP} --swiglu --position-embedding-type rope --global-batch-size 2"),
    (2, f"{CP} --cp-comm-type a2a"),
    (2, f"{PP} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4"),
    (2, "--global-batch-size 4 --use-distributed-optimizer"),
    (2, "--global-batch-size 4 --use-torch-fsdp2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"),
    (2, f"{EP} --global-batch-size 4"),
    (2, "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 8 --q-lora-rank 8 --qk-head-dim 8 "
        f"--qk-pos-emb-head-dim 8 --v-head-dim 8 --disable-bias-linear {SP}"),
    (4, "--num-attention-heads 4 --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4 "
        "--position-embedding-type rope --recompute-activations"),
    (4, f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 4"),
    (4, f"{TP} --data-parallel-sharding-strategy optim_grads_params --global-batch-size 4 --vocab-size 62 "
        "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1"),
    (4, f"{CP} {SP} --mtp-num-layers 1 {EXPERTS} --moe-aux-loss-coeff 0.1"),
]  # fmt: skip


@SLOW
@pytest.mark.parametrize(("world", "line"), mostly_thorough(LAYOUTS, [6]))
def test_every_tensor_of_a_layout_has_its_part_in_one_process(ranks: Any, world: int, line: str) -> None:
    (result, *_) = ranks(world).run(compared, line, timeout=120)
    assert result.first is None, verdict(result)
    assert not result.left_out and len(result.differences) > 60


@pytest.mark.thorough
@pytest.mark.parametrize("line", [f"{SP} --bf16 --swiglu", f"{PP} --bf16 --global-batch-size 4", f"{CP}"])
def test_the_limit_in_the_runs_own_precision_is_measured(ranks: Any, line: str) -> None:
    (result, _) = ranks(2).run(compared, line, exact=False, timeout=90)
    assert result.first is None, verdict(result)
    (wrong, _) = ranks(2).run(compared_wrong, line, timeout=90)
    assert wrong.first is not None


def compared_wrong(rank: int, world: int, line: str) -> Comparison:
    """One percent, on one rank, in bf16."""
    with on_rank_one(CoreAttention, "forward", lambda real: lambda self, q, *rest: real(self, q, *rest) * 1.2)(rank):
        return compared(rank, world, line, exact=False)


# ------------------------------------------------------------------------------------------------ bit for bit


def repeated(rank: int, world: int, line: str, plant: str) -> Any:
    trainer = trainer_of(line, world)
    with few_documents(), TWICE[plant](rank):
        return twice(trainer.run, trainer.mesh, Task, lambda *args: build.build_trainer(*args, quiet=True), 2)


def noisy(real: Any) -> Any:
    """The last bits of an output depend on nothing that a run can repeat."""
    counted = [0]

    def forward(self: Any, *args: Any) -> torch.Tensor:
        counted[0] += 1
        return real(self, *args) * (1.0 + 1e-6 * counted[0])

    return forward


def no_replay() -> Any:
    """What is recomputed draws new random numbers."""
    return mock.patch("minimegatron.comm.random.RngStreams.replay", lambda self, snapshot: contextlib.nullcontext())


TWICE: dict[str, Plant] = {
    "nothing": lambda rank: contextlib.nullcontext(),
    "noise": on_rank_one(CoreAttention, "forward", noisy),
    "recompute": everywhere(no_replay),
}


@pytest.mark.parametrize(
    "plant", [pytest.param(plant, marks=[] if plant == "noise" else [pytest.mark.thorough]) for plant in TWICE]
)
def test_what_is_not_the_same_twice(ranks: Any, plant: str) -> None:
    line = f"{TP} --train-iters 3 --hidden-dropout 0.1 --attention-dropout 0.1"
    if plant != "noise":
        line += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (result, other) = ranks(2).run(repeated, line, plant, timeout=90)
    assert result == other
    what, where, _ = result.verdict()
    if plant == "nothing":
        assert result.first is None and "2 steps taken twice are the same, bit for bit" in what
    elif plant == "noise":
        assert result.ranks == (1,) and where == "rank 1"
        assert "layers.0.self_attention.core_attention" in what and "(CoreAttention) of step 1" in what
    else:
        assert result.recomputed and "recomputed output of decoder.layers." in what and where == "ranks 0-1"


# ------------------------------------------------------------------------------------------------ bad steps

BAD = "--train-iters 3 --micro-batch-size 1 --global-batch-size 4 --hidden-dropout 0.1 --attention-dropout 0.1"
STEP = 1  # the second one: samples 4 to 7; those of rank 1 are 5 and 7


def bad_fc2(wrong: Callable[[Any, torch.Tensor], bool], value: float = float("inf"), back: bool = False) -> Any:
    """The last layer's fc2 gives `value` where `wrong(module, input)`; or its gradient does."""
    real = linear.RowParallelLinear.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = real(self, x)
        if getattr(self, "planted", False) and wrong(self, x):
            if back:
                x.register_hook(lambda grad: grad * value)
                return y
            return y * value
        return y

    return mock.patch.object(linear.RowParallelLinear, "forward", forward)


def a_bad_step(rank: int, world: int, plant: str, line: str) -> tuple[str, str, str]:
    """What the error of a bad step says: what, where, fix."""
    state: dict[str, Any] = {"step": -1, "sample": torch.zeros(1), "calls": 0}

    def forward_step(batches: Iterator[Any], model: Any) -> Any:
        batch = next(batches)
        state["sample"], state["calls"] = batch["tokens"], state["calls"] + 1
        output, summed = plain_step(iter((batch,)), model)
        if plant == "spike" and bool((batch["tokens"][0] == bad_tokens).all()):
            output = output * 30.0
        return output, summed

    trainer = trainer_of(f"{BAD} {line}", world, forward_step=forward_step)
    bad_tokens = trainer.train_set[7]["tokens"].to(trainer.mesh.device)
    for name, module in trainer.model.named_modules():
        if name.endswith("layers.1.mlp.linear_fc2"):
            module.planted = True

    def on_the_sample(self: Any, x: torch.Tensor) -> bool:
        return bool((state["sample"][0] == bad_tokens).all())

    first_time = [0]

    def once(self: Any, x: torch.Tensor) -> bool:
        first_time[0] += 1
        return rank == 1 and first_time[0] == 2 * STEP + 2

    planted = {
        "document": lambda: bad_fc2(on_the_sample),
        "gradient": lambda: bad_fc2(on_the_sample, float("nan"), back=True),
        "machine": lambda: bad_fc2(lambda self, x: rank == 1 and trainer.state.iteration == STEP, float("nan")),
        "transient": lambda: bad_fc2(once),
        "weight": contextlib.nullcontext,
        "spike": contextlib.nullcontext,
    }[plant]
    if plant == "weight" and rank == 1:
        dict(logical_parameters(trainer.model))["decoder.layers.0.mlp.linear_fc1.weight"].data[3, 4] = float("inf")
    if plant == "spike":
        trainer.state.recent_losses = [4.5] * 16
    with planted():
        try:
            trainer.train()
        except (BadStep, RankError) as error:
            return error.what, error.where, error.fix
        finally:
            trainer.close()
    return "", "", ""


FC2 = "decoder.layers.1.mlp.linear_fc2"
# Plant -> (flags, what the message says).
REPLAYED: dict[str, tuple[str, list[str]]] = {
    "document": ("", ["data", f"output of {FC2} (RowParallelLinear) is the first", "on rank 1, microbatch 1",
                      "sample 7 has a loss of nan", "document "]),
    "gradient": ("", ["data", "the gradient of the output of decoder.layers.1.mlp.linear_fc1",
                      "on rank 1, microbatch 1"]),
    "machine": ("", ["persistent", f"output of {FC2} (RowParallelLinear)", "on rank 1, microbatch 0",
                     "take this rank's machine out"]),
    "transient": ("", ["transient", "the step is good"]),
    "weight": (TP, ["weight", "decoder.layers.0.mlp.linear_fc1.weight is not finite on rank 1"]),
    "spike": ("--spiky-loss-factor 2",
              ["data", "sample 7 has a loss of", ", on rank 1", "times the mean of the last 16"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "plant", [pytest.param(p, marks=[] if p == "document" else [pytest.mark.thorough]) for p in REPLAYED]
)
def test_a_bad_step_is_taken_again(ranks: Any, plant: str) -> None:
    line, said = REPLAYED[plant]
    both = ranks(2).run(a_bad_step, plant, line, timeout=90)
    for what, where, fix in both:
        assert f"replayed: {said[0]}: " in what, (what, where, fix)
        text = f"{what}; {where}; {fix}"
        for words in said[1:]:
            assert words in text, text


def test_a_replay_costs_nothing_but_time_and_leaves_the_run_as_it_was() -> None:
    ends = []
    for mode in ("disabled", "validate_results"):
        trainer = trainer_of(f"{BAD} --bad-step skip --rerun-mode {mode}", forward_step=_nan_in_step_one())
        trainer.train()
        trainer.close()
        ends.append((trainer.state, [p.clone() for p in trainer.model.parameters()]))
    assert ends[0][0] == ends[1][0] and ends[0][0].skipped_iterations == 1
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def _nan_in_step_one() -> Any:
    def step(batches: Iterator[Any], model: Any) -> Any:
        batch = next(batches)
        output, summed = plain_step(iter((batch,)), model)
        return output * (float("nan") if int(batch["tokens"].sum()) == step.marked else 1.0), summed  # type: ignore[attr-defined]

    step.marked = int(trainer_of(BAD).train_set[5]["tokens"].sum())  # type: ignore[attr-defined]
    return step


# ------------------------------------------------------------------------------------------------ the command


def on_command_line(rank: int, world: int, words: str) -> str:
    chosen, flags, other = command.parse(shlex.split(f"{TINY} --mock-data {words}"))
    with few_documents():
        try:
            command.compare(chosen, flags, other)
        except (RankError, ConfigError) as error:
            return str(error)
    return "agree"


def test_the_command_writes_what_it_found(ranks: Any, tmp_path: Any) -> None:
    file = tmp_path / "found.json"
    line = f"--num-layers 1 --json {file} --against --kernels torch --attention-backend reference"
    results = ranks(1).run(on_command_line, line, timeout=60)
    assert results == ["agree"] and "two ways to compute it on 1 rank: " in results.stdout[0]
    found = json.loads(file.read_text())
    assert found["agree"] and found["first"] is None and len(found["differences"]) > 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fp8-format e4m3 --bf16", "minimegatron compare with fp8_format"),
        ("--num-layers 50 --hidden-size 512 --global-batch-size 512", "FLOP in fp64 on one rank"),
        ("--load nowhere", "the weights of step 0"),
        ("--against --seq-length 8", "--against changes seq_length"),
        (f"--in-precision {EXPERTS}", "a rounding sends a token"),
        ("--twice --in-precision", "--in-precision and --twice are given"),
        ("--against", "--against without flags"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: str, said: str) -> None:
    try:
        assert said in on_command_line(0, 1, words)
    except ConfigError as error:
        assert said in str(error)


def test_as_few_ranks_as_the_layout_needs() -> None:
    line = shlex.split(f"{TINY} --mock-data --num-layers 2")
    assert command.fewest_ranks(line) == 1
    assert command.fewest_ranks([*line, *shlex.split(f"{TP} {PP}")]) == 4
    with pytest.raises(ConfigError, match="no flag"):
        command.fewest_ranks([*line, "--tensor-parallel-size", "2"])


def test_a_parse_of_flags_is_that_of_train() -> None:
    chosen, flags, other = command.parse(["--mock-data", "--ranks", "2", "--against", "--kernels", "torch"])
    assert (chosen.ranks, flags, other) == (2, ["--mock-data"], ["--kernels", "torch"])
    assert parse_args([*flags, *other]).model.kernels == "torch"


def test_a_sample_is_found_in_its_file(tmp_path: Any) -> None:
    tokenizer, texts = ByteTokenizer(), ["the first document", "a second one", "and the third of them all"]
    with IndexedDatasetBuilder(tmp_path / "text.bin", np.uint16) as builder:
        for text in texts:
            ids = [*text.encode(), tokenizer.eod]
            builder.add_document(ids, [len(ids)])
        builder.finalize(tmp_path / "text.idx")
    indexed = IndexedDataset(str(tmp_path / "text"))
    dataset = GPTDataset(indexed, np.arange(len(texts)), None, GPTDatasetConfig(8, tokenizer))
    for sample in range(len(dataset)):
        said = origin(dataset, sample, tokenizer)
        byte = int(said.partition("from byte ")[2].partition(" of ")[0])
        ids = dataset[sample]["tokens"]
        assert np.fromfile(tmp_path / "text.bin", np.uint16, 1, offset=byte) == int(ids[0])
        assert (
            repr(tokenizer.detokenize(ids.tolist()))[1:-1] in said and f"document {indexed_at(byte, indexed)}" in said
        )


def indexed_at(byte: int, indexed: IndexedDataset) -> int:
    """The document that has this byte."""
    return int(np.searchsorted(indexed.sequence_pointers, byte, side="right")) - 1
