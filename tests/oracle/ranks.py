"""Megatron on ranks of its own: a function on `world` fresh processes without a GPU, and what rank 0 returned.

Fresh, because `megatron_cpu.install` changes torch for the rest of a process.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.oracle import megatron_cpu

DEADLINE_SECONDS = 240.0
# Fields of Megatron's TransformerConfig: nothing random, and no fusion that needs a GPU.
PLAIN_CONFIG: dict[str, Any] = {
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}


def run(work: Callable[..., Any], world: int, *args: Any, tp: int = 1, pp: int = 1) -> Any:
    """`work(rank, world, *args)` on ranks whose parallel state is that of tp and pp; the answer of rank 0.

    Raises:
        TimeoutError: the ranks did not finish within the deadline; they are killed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(_rank, (work, world, args, tp, pp, folder), world, join=False)
        end = time.monotonic() + DEADLINE_SECONDS
        while not ranks.join(timeout=5.0):
            if time.monotonic() > end:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"the ranks of {args} did not finish within {DEADLINE_SECONDS:.0f} s")
        return torch.load(f"{folder}/results.pt", weights_only=True)


def _rank(
    rank: int, work: Callable[..., Any], world: int, args: tuple[Any, ...], tp: int, pp: int, folder: str
) -> None:
    torch.set_num_threads(1)
    megatron_cpu.install()
    megatron_cpu.patch_megatron()
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1234)
    result = work(rank, world, *args)
    if rank == 0:
        torch.save(result, f"{folder}/results.pt")
    dist.barrier()
    dist.destroy_process_group()
