"""How fast training is on a CPU: against the loop one would write with Hugging Face, and in parallel against alone.

    OMP_NUM_THREADS=1 python -m benchmarks.train            all comparisons, a few minutes
    OMP_NUM_THREADS=1 python -m benchmarks.train --smoke    the same code on tiny sizes, seconds

| comparison | A                                | B                                     | reported            |
|------------|----------------------------------|---------------------------------------|---------------------|
| `hf`       | our step, one process            | transformers' Llama, AdamW, clipping  | speed-up, B / A     |
| `tp2` ...  | two ranks, CPU-s of both added   | one process, the same tokens          | efficiency, B / A   |

Every contender trains the same model on the same number of tokens in fp32: forward, backward, clip to 1, AdamW. The
cost is CPU-seconds of whole steps after a warm-up step (`benchmarks/paired.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.paired import paired
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.workers import WarmPool
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import count_parameters, family_config
from minimegatron.optim.optimizer import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.ddp import DistributedDataParallel
from minimegatron.training.step import forward_step, train_step

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp2": {},
    "dp2 overlap": {"overlap_grad_reduce": True, "ddp_bucket_size": 1_000_000},
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: fields of a Llama.
        batch, micro_batch, seq_length: samples of a step, of a forward pass, and their tokens.
        steps: that are timed in one run.
    """

    model: dict[str, Any]
    batch: int
    micro_batch: int
    seq_length: int
    steps: int

    @property
    def config(self) -> TransformerConfig:
        return family_config("llama", **self.model)


FULL = Workload(
    {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 768}
    | {"vocab_size": 8192},
    batch=4, micro_batch=2, seq_length=256, steps=2,
)  # fmt: skip
SMOKE = Workload(
    {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 64}
    | {"vocab_size": 64},
    batch=4, micro_batch=2, seq_length=16, steps=1,
)  # fmt: skip


def tokens(work: Workload, samples: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of `samples` random sequences."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(0, work.config.vocab_size, (samples, work.seq_length + 1), generator=generator)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(samples, work.seq_length)}


def our_step(work: Workload, mesh: Mesh) -> Callable[[], None]:
    """One training step of ours on this mesh."""
    parallel = mesh.parallel
    model = build_model(work.config, mesh, seed=0)
    ddp = DistributedDataParallel(model, mesh, parallel.ddp_bucket_size, parallel.overlap_grad_reduce)
    config = OptimizerConfig(lr=1e-4, clip_grad=1.0, lr_decay_style="constant")
    optimizer = build_optimizer(config, ddp, mesh)
    schedule = Schedule.from_config(config, global_batch_size=1, train_iters=1000)
    scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule)
    data, n = tokens(work, work.micro_batch), work.batch // (work.micro_batch * mesh.dp.size)
    return lambda: train_step(forward_step, data, ddp, optimizer, scheduler, mesh, num_microbatches=n) and None


def hugging_face_model(work: Workload) -> Any:
    """transformers' Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = work.config
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.ffn_hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_query_groups,
        vocab_size=c.vocab_size,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def hugging_face_step(work: Workload) -> Callable[[], None]:
    """The same step with transformers' Llama and torch's optimizer, as one would write it."""
    model = hugging_face_model(work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data, n = tokens(work, work.micro_batch), work.batch // work.micro_batch

    def step() -> None:
        optimizer.zero_grad()
        for batch in itertools.islice(data, n):
            logits = model(input_ids=batch["tokens"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            (loss / n).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def cpu_seconds(step: Callable[[], None], steps: int) -> float:
    """CPU-seconds of this process for so many steps."""
    begun = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - begun


def on_rank(rank: int, world: int, work: Workload, layout: dict[str, Any]) -> float:
    """CPU-seconds of one rank, after a warm-up step."""
    step = our_step(work, Mesh.build(ParallelConfig.from_dict(layout)))
    step()
    return cpu_seconds(step, work.steps)


def compare(name: str, work: Workload, pairs: int, warmups: int) -> str:
    """Run one comparison; a line for `RECORDS.md`."""
    if name == "hf":
        ours, theirs = our_step(work, Mesh.serial()), hugging_face_step(work)
        ratio = paired(lambda: cpu_seconds(ours, work.steps), lambda: cpu_seconds(theirs, work.steps), pairs, warmups)
        what = "tokens per CPU-second against the Hugging Face loop"
    else:
        layout = LAYOUTS[name]
        with WarmPool(2) as two, WarmPool(1) as one:
            ratio = paired(
                lambda: sum(two.run(on_rank, work, layout, timeout=300)),
                lambda: sum(one.run(on_rank, work, {}, timeout=300)),
                pairs,
                warmups,
            )
        what = f"{name}: efficiency against one process"
    per_second = work.batch * work.seq_length * work.steps
    return f"{what}: {ratio}; {per_second / ratio.a:.0f} against {per_second / ratio.b:.0f} tokens per CPU-second"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", nargs="*", choices=["hf", *LAYOUTS], default=["hf", *LAYOUTS])
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    work, pairs, warmups = (SMOKE, 2, 0) if args.smoke else (FULL, args.pairs, 2)
    size = count_parameters(work.config) / 1e6
    print(
        f"torch {torch.__version__}, {platform.machine()}, 1 thread a rank; {size:.1f} M-parameter Llama in fp32, "
        f"{work.batch} x {work.seq_length} tokens a step; median of {pairs} A B B A pairs (quartiles)"
    )
    for name in args.only:
        print(compare(name, work, pairs, warmups), flush=True)


if __name__ == "__main__":
    main()
