"""picotron as a contender in `benchmarks/train.py`: a step of its training on one rank, from a checkout of it.

| layout       | how its `train.py` does it                             |
|--------------|--------------------------------------------------------|
| one process  | its Llama                                              |
| `tp2`        | `apply_tensor_parallel`                                |
| `dp2`        | `DataParallelBucket`                                   |
| `pp2`        | `PipelineParallel`, `train_step_pipeline_1f1b`         |

Model, tokens, microbatches and measure are those of the other contenders, and freed memory is kept. It gets torch's
fused AdamW, which its script asks for on CUDA alone, and does not clip, as its script does not; ours clips. Empty
modules stand for `flash_attn`, which is imported and not used with `FLASH_ATTEN=0`; `torch.cuda.synchronize` does
nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from benchmarks.contenders import Workload, cpu_seconds, llama_sizes, tokens
from minimegatron.launch import procs

LAYOUTS = ("one", "tp2", "dp2", "pp2")
ENVIRONMENT = {"FLASH_ATTEN": "0", "DTYPE": "float32", "DEVICE": "cpu", "CONTEXT_PARALLEL": "0"}


class Batches:
    """What its training loops read: microbatches by its names, and how many of them a step has."""

    def __init__(self, work: Workload, replicas: int) -> None:
        self.grad_acc_steps = work.batch // (work.micro_batch * replicas)
        self._batches = tokens(work, work.micro_batch)
        self._positions = torch.arange(work.seq_length).expand(work.micro_batch, -1)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = next(self._batches)
        return {"input_ids": batch["tokens"], "target_ids": batch["labels"], "position_ids": self._positions}


def picotron_step(work: Workload, layout: str) -> Callable[[], None]:
    """One training step of picotron's on this rank, put together as its `train.py` does."""
    for name, what in {
        "flash_attn_interface": "flash_attn_func",
        "layers.rotary": "apply_rotary_emb",
        "ops.triton.layer_norm": "layer_norm_fn",
    }.items():
        parts = ["flash_attn", *name.split(".")]
        for module in (".".join(parts[: n + 1]) for n in range(len(parts))):
            sys.modules.setdefault(module, types.ModuleType(module))
        setattr(sys.modules[".".join(parts)], what, None)
    import picotron.process_group_manager as pgm
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    pgm.setup_process_group_manager(
        **{f"{axis}_size": 2 if layout == f"{axis}2" else 1 for axis in ("tp", "cp", "pp", "dp")}
    )
    c = work.config
    config = types.SimpleNamespace(  # it reads these fields of transformers' LlamaConfig
        **llama_sizes(work),
        max_position_embeddings=work.seq_length,
        rms_norm_eps=c.layernorm_epsilon,
        rope_theta=10000.0,
    )
    model = Llama(config)
    if layout == "tp2":
        model = apply_tensor_parallel(model)
    if layout == "pp2":
        model = PipelineParallel(model, config)
    if layout == "dp2":
        model = DataParallelBucket(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = Batches(work, 2 if layout == "dp2" else 1)
    shape = (work.micro_batch, work.seq_length, c.hidden_size)

    def passes() -> None:
        for i, batch in enumerate(itertools.islice(data, data.grad_acc_steps)):
            model.require_backward_grad_sync = layout == "dp2" and i == data.grad_acc_steps - 1
            logits = model(input_ids=batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten())
            (loss / data.grad_acc_steps).backward()
            loss.item()

    def step() -> None:
        optimizer.zero_grad()
        if layout == "pp2":
            with mock.patch.object(torch.cuda, "synchronize"):
                train_step_pipeline_1f1b(model, data, shape, torch.device("cpu"), torch.float32)
        else:
            passes()
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()

    return step


def on_picotron_rank(rank: int, world: int, work: Workload, layout: str, folder: str) -> float:
    """CPU-seconds of one of its ranks, after two warm-up steps."""
    sys.path.insert(0, folder)
    procs.keep_memory()
    with mock.patch.dict(os.environ, {**ENVIRONMENT, "LOCAL_RANK": str(rank)}):
        step = picotron_step(work, layout)
        cpu_seconds(step, 2)
        return cpu_seconds(step, work.steps)
