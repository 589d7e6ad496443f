"""Who trains in `benchmarks/train.py`: our step on any layout, and the loop one would write with Hugging Face."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.launch import procs
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.families import family_config
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.training.step import forward_step, train_step


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
    batch=16, micro_batch=2, seq_length=256, steps=1,
)  # fmt: skip
LONG = dataclasses.replace(FULL, batch=4, micro_batch=1, seq_length=2048)  # what context parallelism is for
SMOKE = Workload(
    {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 64}
    | {"vocab_size": 64},
    batch=4, micro_batch=2, seq_length=16, steps=1,
)  # fmt: skip


def tokens(work: Workload, samples: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of `samples` random sequences."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(0, work.model["vocab_size"], (samples, work.seq_length + 1), generator=generator)
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.ones(samples, work.seq_length)}


def our_step(work: Workload, mesh: Mesh) -> Callable[[], None]:
    """One training step of ours on this mesh."""
    ddp = data_parallel(build_model_chunks(work.config, mesh, 0), mesh)
    config = OptimizerConfig(lr=1e-4, clip_grad=1.0, lr_decay_style="constant")
    optimizer = build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    schedule = Schedule.from_config(config, global_batch_size=1, train_iters=1000)
    scheduler = OptimizerParamScheduler(optimizer.param_groups, schedule)
    data = (cut_batch(batch, mesh) for batch in tokens(work, work.micro_batch))
    n = work.batch // (work.micro_batch * mesh.dp.size)
    return lambda: train_step(forward_step, data, ddp, optimizer, scheduler, n) and None


def llama_sizes(work: Workload) -> dict[str, int]:
    """The sizes of the model, by the names of transformers' LlamaConfig."""
    c = work.config
    return {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.ffn_hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_query_groups,
        "vocab_size": c.vocab_size,
    }


def hugging_face_model(work: Workload) -> Any:
    """transformers' Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_sizes(work), tie_word_embeddings=False, use_cache=False)
    return LlamaForCausalLM(config)


def hugging_face_step(work: Workload, compiled: bool = False) -> Callable[[], None]:
    """The same step with transformers' Llama and torch's optimizer, as one would write it."""
    model = hugging_face_model(work)
    if compiled:
        model.compile()
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


def on_rank(rank: int, world: int, work: Workload, layout: dict[str, Any] | None) -> float:
    """CPU-seconds of one rank, after two warm-up steps; without a layout it takes its share of the samples, alone.

    Two, because the first step finds memory for everything and the second often some more for the largest tensor, whose
    pages cost a tenth of a step.
    """
    procs.keep_memory()
    if layout is None:
        step = our_step(dataclasses.replace(work, batch=work.batch // world), Mesh.serial())
    else:
        step = our_step(work, Mesh.build(ParallelConfig.from_dict(layout)))
    cpu_seconds(step, 2)
    return cpu_seconds(step, work.steps)


def nothing(rank: int, world: int) -> None:
    """A job that costs only what a job costs."""
