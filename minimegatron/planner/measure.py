"""This machine as a `Cluster`: products, copies, operations and messages timed, and the rates that follow.

| rate       | what is timed                                     | fitted                                             |
|------------|---------------------------------------------------|----------------------------------------------------|
| copy       | a tensor onto another, larger than any cache      | read and written bytes a second                    |
| matmul     | a square product in the dtype of training         | its time, less that of the bytes that it touches   |
| link       | on a CPU: all-reduces, gathers, shifts of ranks   | sent bytes a second, and seconds of a step         |
| operations | on a CPU: `linear`, `attention`, ..., see below   | seconds of a call, of a FLOP and of a byte         |

**Operations.** Without fused kernels most operations reach neither the rate of products nor that of copies: SwiGLU is
five passes over memory and an exponential. So each module of a layer runs alone, forward and backward, in a few shapes
(`linear` to `optimizer` below); a recorder counts its calls, FLOPs and bytes (`footprint/recorder`), and three numbers
are fitted to its times:

    seconds = c calls + f FLOPs + b bytes         c, f, b not below 0

No model is run, and no step; the shapes are those of no model of `benchmarks/planned.py`. Logits are new memory in
every microbatch, so those that are timed have more than 32 MB, which glibc always gives back. Heads have 32 channels,
as those of small models; with 64 channels a FLOP takes a sixth less.

On a CPU as many ranks measure at once as the run will have here, since they take caches and cores from each other. A
rank that sends does not compute: nothing overlaps.

**Two clocks.** `WALL` is a plan's: the fastest repetition counts, since other processes can only slow one down. `CPU`
counts seconds of the processor, the median of the repetitions: waiting for another rank is not in it, so the sum over
ranks is what a run costs, however many share a core.

A GPU whose name `cluster.CLUSTERS` knows keeps its peaks and gets measured shares; of any other device the measured
rates are the peaks. Neither links of GPUs nor the host's time for an operation (`Cluster.call`) are measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.axis import ALONE, Axis
from minimegatron.comm.collectives import all_gather, all_reduce, reduce_scatter
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.ring import SHIFT, Shift
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.errors import RankError
from minimegatron.footprint.events import Operation
from minimegatron.footprint.recorder import Recorder, recording
from minimegatron.launch.procs import RUN_DIR
from minimegatron.launch.rank import init, report, run_rank
from minimegatron.layers.attention.self_attention import AttentionContext, SelfAttention
from minimegatron.layers.embedding import VocabParallelEmbedding
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.layers.mlp import MLP
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init
from minimegatron.layers.rope import RotaryEmbedding
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.planner.cluster import CALL, CLUSTERS, Cluster
from minimegatron.planner.update import update_time
from minimegatron.trace import Event

Run = Callable[[], object]
Counts = tuple[float, float, float]
SIDES = [(256, 192, 384), (512, 384, 1024), (512, 1024, 384), (768, 512, 1536)]  # tokens, inputs, outputs
SHAPES = [(192, 32, 256, 1), (384, 32, 256, 4), (320, 32, 1024, 1), (384, 32, 768, 1)]  # width, of a head, s, b
WORDS = [(256, 2048), (512, 6144)]  # tokens, vocabulary
LOGITS = (1024, 9216)
UPDATED = (96, 320)  # width of a model


@dataclasses.dataclass(frozen=True)
class Trial:
    """One operation in one shape.

    Attributes:
        kind: kind of the operation.
        asked: its calls, FLOPs and bytes, forward and backward.
        run: runs it once.
    """

    kind: str
    asked: Counts
    run: Run


@dataclasses.dataclass(frozen=True)
class Timed:
    """A trial and its measured seconds."""

    kind: str
    asked: Counts
    seconds: float


class Through(nn.Identity):
    """An identity in place of a linear layer."""

    def __init__(self, inputs: int, outputs: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = torch.empty(outputs, inputs, device="meta")


def trials() -> Iterator[Trial]:
    """All trials of this device."""
    for n, i, o in SIDES:
        yield linear(n, i, o)
    for h, d, s, b in SHAPES:
        config = model(h, h // d)
        yield from (attention(config, s, b), norm(config, s, b), activation(config, s, b))
    for n, vocabulary in WORDS:
        yield table(n, vocabulary)
    yield loss(*LOGITS)
    for h in UPDATED:
        yield optimizer(model(h, 8, 4096))


def model(h: int, heads: int, vocabulary: int = 256) -> TransformerConfig:
    """The configuration of a small model like Llama."""
    return TransformerConfig(
        num_layers=1, hidden_size=h, num_attention_heads=heads, num_query_groups=heads // 2, ffn_hidden_size=3 * h,
        vocab_size=vocabulary, normalization="RMSNorm", activation="swiglu", position_embedding_type="rope",
        add_bias_linear=False, untie_embeddings_and_output_weights=True,
    )  # fmt: skip


def trial(kind: str, call: Callable[..., Any], *inputs: torch.Tensor) -> Trial:
    """A trial of `call`: forward, and backward with the gradients of every output; run once here, while a `Recorder`
    counts."""
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = call(*leaves)
    grads = [torch.ones_like(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs = call(*leaves)
        torch.autograd.backward(outputs if isinstance(outputs, tuple) else (outputs,), grads)

    return Trial(kind, counted(run), run)


def counted(run: Run) -> Counts:
    """Calls, FLOPs and bytes of `run`, as a plan counts them."""
    recorder = Recorder([], {})
    with recording(recorder):
        run()
    done = [event.what for event in recorder.events if isinstance(event.what, Operation)]
    return float(len(done)), sum(o.flops for o in done), float(sum(o.nbytes for o in done))


def wrapped(module: nn.Module) -> DistributedDataParallel:
    """The module in a data-parallel wrapper, whose buffer gets the gradients."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return DistributedDataParallel(module, Mesh.serial())


def linear(n: int, i: int, o: int) -> Trial:
    layer = ColumnParallelLinear(i, o, ALONE, init=Init(), bias=False)
    return trial("linear", wrapped(layer), torch.rand(n, 1, i))


def attention(config: TransformerConfig, s: int, b: int) -> Trial:
    module = SelfAttention(config, Mesh.serial(), column=Through, row=Through)
    rotary = RotaryEmbedding(config)(torch.arange(s).expand(b, -1))
    rows = torch.rand(s, b, module.linear_qkv.outputs)
    return trial("attention", lambda x: module(x, AttentionContext(rotary)), rows)


def norm(config: TransformerConfig, s: int, b: int) -> Trial:
    streams = [torch.rand(s, b, config.hidden_size) for _ in range(2)]
    return trial("norm", wrapped(Norm(config)), *streams)


def activation(config: TransformerConfig, s: int, b: int) -> Trial:
    module = MLP(config, Mesh.serial(), column=Through, row=Through)
    return trial("activation", module, torch.rand(s, b, module.linear_fc1.outputs))


def table(n: int, vocabulary: int) -> Trial:
    module = VocabParallelEmbedding(vocabulary, 256, ALONE, init=Init())
    return trial("table", wrapped(module), torch.arange(n).view(1, -1) % vocabulary)


def loss(n: int, vocabulary: int) -> Trial:
    """A trial of the loss; its logits are in memory that the system has to provide first."""
    labels, words = torch.arange(n).view(-1, 1) % vocabulary, torch.rand(vocabulary, 1)
    call = partial(vocab_parallel_cross_entropy, target=labels, tp=ALONE)
    return trial("loss", lambda x: call(F.linear(x, words)), torch.rand(n, 1, 1))


def optimizer(config: TransformerConfig) -> Trial:
    mesh = Mesh.serial()
    ddp = wrapped(build_model(config, mesh, 0))
    built = build_optimizer(OptimizerConfig(), ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)

    def run() -> None:
        ddp.zero_grad_buffer()
        ddp.scale_gradients(0.5)
        built.step()

    nbytes = update_time(ddp, OptimizerConfig(), Cluster(copy=1.0, copy_share=1.0))
    return Trial("optimizer", (1.0, 0.0, nbytes), run)


def fitted(asked: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """c, f and b with the smallest errors relative to the times; as many of the three as suffice are 0."""
    times = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.tensor(asked, dtype=torch.float64) / times[:, None]
    unit = rows.amax(0).clamp(min=1e-30)
    best, least = [0.0] * 3, float("inf")
    for used in itertools.chain.from_iterable(itertools.combinations((2, 1, 0), k) for k in (1, 2, 3)):
        some = (rows / unit)[:, list(used)]
        found = torch.linalg.lstsq(some, torch.ones_like(times)[:, None]).solution[:, 0]
        error = float((some @ found - 1).square().sum())
        if bool((found > 0).all()) and bool((some.amax(0) > 0).all()) and error < least - 1e-9:
            best, least = [0.0] * 3, error
            for number, value in zip(used, found, strict=True):
                best[number] = float(value / unit[number])
    return best


def fits(times: Iterable[Timed]) -> dict[str, list[float]]:
    """{kind: c, f, b} for each kind of operation."""
    found: dict[str, list[Timed]] = {}
    for one in times:
        found.setdefault(one.kind, []).append(one)
    return {kind: fitted([t.asked for t in of], [t.seconds for t in of]) for kind, of in found.items()}


@dataclasses.dataclass(frozen=True)
class Clock:
    """A clock, and how repetitions are summarised.

    Attributes:
        now: reads the clock, in seconds.
        of: repetitions -> the time that counts.
    """

    now: Callable[[], float]
    of: Callable[[Sequence[float]], float]

    def __call__(self, call: Run, device: torch.device, repeats: int) -> float:
        """Seconds of a call, after a first call that is not counted."""
        found, others = [], torch.zeros(BETWEEN[device.type] // 4, device=device)
        for _ in range(repeats + 1):
            others.add_(1)  # what the caches hold in a step is not what this operation wants
            _wait(device)
            begun = self.now()
            call()
            _wait(device)
            found.append(self.now() - begun)
        return self.of(found[1:])


WALL, CPU = Clock(time.perf_counter, min), Clock(time.process_time, statistics.median)
REPEATS = 7
SIZES = {"cpu": (1024, 2**25), "cuda": (8192, 2**30)}  # of a product's sides, bytes of a copied tensor
MESSAGES = (2**14, 2**18, 2**20, 2**23)  # bytes
RANKS = 2  # at least; messages need them
SECONDS = 600.0  # longest measurement
BETWEEN = {"cpu": 2**24, "cuda": 2**28}  # bytes that are touched between two repetitions


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, clock: Clock = WALL, repeats: int = REPEATS, ranks: int = RANKS) -> Cluster:
    """Time this device: a CPU, with products in fp32 and so many ranks at once; or a GPU, in bf16."""
    if device.type == "cuda":
        return _of_gpu(device, *_rates(device, clock, repeats))
    found = _on_ranks(max(ranks, RANKS), clock, repeats)
    computed, copied = map(statistics.mean, zip(*(rates for rates, _ in found), strict=True))
    operations = fits(row for _, rows in found for row in rows)
    step, _, byte = operations["all_reduce"]
    return Cluster(
        gpu=platform.processor() or platform.machine(), gpus_per_node=1024, memory=float(_host_memory()), reserve=0.0,
        matmul=computed, copy=copied, inside=1 / byte, between=1 / byte, latency_inside=step, latency_between=step,
        matmul_share=1.0, copy_share=1.0, link_share=1.0, device="cpu", overlaps=False, operations=operations,
    )  # fmt: skip


def _on_ranks(ranks: int, clock: Clock, repeats: int) -> list[tuple[tuple[float, float], list[Timed]]]:
    """What `on_rank` returns on each of several ranks on CPUs; torchrun runs this file as their program."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--log-dir", folder, "-m", __name__, "cpu" if clock is CPU else "wall", str(repeats)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", RUN_DIR: folder}
        try:
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
        except subprocess.SubprocessError as error:
            written = str(getattr(error, "stderr", None) or "")
            raise RankError(f"the ranks that measure failed: {error}", where=written[-2000:]) from None
        reports = [json.loads(Path(folder, f"report.{rank}.json").read_text()) for rank in range(ranks)]
    return [(rates, [Timed(kind, tuple(asked), seconds) for kind, asked, seconds in rows]) for rates, rows in reports]


def on_rank(clock: Clock, repeats: int) -> tuple[tuple[float, float], list[Timed]]:
    """(Rates of products and copies, times of operations and messages) of one of several ranks on a CPU."""
    device = torch.device("cpu")
    tried = [*trials(), *messages(Axis.world("world"))]
    times = [Timed(one.kind, one.asked, clock(one.run, device, repeats)) for one in tried]
    return _rates(device, clock, repeats), times


def _rates(device: torch.device, clock: Clock, repeats: int) -> tuple[float, float]:
    """FLOP/s of a product, bytes/s of a copy."""
    side, nbytes = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    copied = 2 * nbytes / clock(lambda: b.copy_(a), device, repeats)
    x, y, out = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(3))
    touched = 3 * side * side * dtype.itemsize / copied
    seconds = clock(lambda: torch.mm(x, y, out=out), device, repeats)
    return 2 * side**3 / max(seconds - touched, seconds / 10), copied


def messages(axis: Axis) -> Iterator[Trial]:
    """Trials of collectives over the axis, in several sizes."""
    for nbytes in MESSAGES:
        x, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // axis.size)
        for name, run in (
            ("all_reduce", lambda x=x: all_reduce(x, axis)),
            ("all_gather", lambda x=part: all_gather(x, axis)),
            ("reduce_scatter", lambda x=x: reduce_scatter(x, axis)),
            (SHIFT, lambda x=x: Shift(x, axis).wait()),
        ):
            sent = Event(name, "comm", 0, 0.0, 0.0, nbytes=nbytes, size=axis.size).wire_bytes
            yield Trial(name, (float(Cluster.steps(name, axis.size)), 0.0, sent), run)


def _of_gpu(device: torch.device, computed: float, copied: float) -> Cluster:
    name, memory = torch.cuda.get_device_name(device), float(torch.cuda.get_device_properties(device).total_memory)
    known = next((cluster for cluster in CLUSTERS.values() if cluster.gpu in name.split()[1:]), None)
    if known is None:
        peaks = {"matmul": computed, "copy": copied, "matmul_share": 1.0, "copy_share": 1.0}
        nodes = {"gpus_per_node": torch.cuda.device_count(), "call": CALL}
        return Cluster(gpu=name, memory=memory, **nodes, **peaks)  # type: ignore[arg-type]
    return known.replace(memory=memory, matmul_share=computed / known.matmul, copy_share=copied / known.copy)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _main() -> None:
    """The program of one rank: `measure.py CLOCK REPEATS`."""
    init()
    rates, times = on_rank({"cpu": CPU, "wall": WALL}[sys.argv[1]], int(sys.argv[2]))
    report([rates, [dataclasses.astuple(one) for one in times]])


if __name__ == "__main__":
    run_rank(_main)
