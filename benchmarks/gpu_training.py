"""Whole training steps of a Llama with 1.2 B parameters on one GPU, in several ways.

Sequence 4096, fp32 main parameters, gradients and moments, no recompute. The micro-batch is the largest of a list that
fits the first way; the others begin with the same. FP8 is compared with bf16 by time: it has no share, for MFU is one
of the bf16 peak.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_parts import Found, Row, Yielded
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.models.chunks import count_parameters
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.training.flops import peak_tflops, step_flops
from minimegatron.training.graphs import StepGraph
from minimegatron.training.step import StepOptions, forward_backward, forward_step, train_step

Timer = Callable[[Callable[[], object], torch.device, int], float]
LLAMA_1B = {
    "num_layers": 22, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 16, "ffn_hidden_size": 5632,
    "vocab_size": 32000, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
TINY = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128,
    "vocab_size": 256, "untie_embeddings_and_output_weights": False,
}  # fmt: skip
DELAYED = {"fp8_format": "hybrid", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
# name -> fields of the model; the first is what the others are compared with
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, torch alone": {"kernels": "torch"},
    "FP8 delayed": DELAYED,
    "FP8 tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "FP8 delayed, Transformer Engine": {**DELAYED, "transformer_impl": "transformer_engine"},
    "bf16, one CUDA graph": {},
    "bf16, torch.compile": {"kernels": "torch"},
}
FIRST = next(iter(WAYS))


class Training:
    """A model with its optimizer, and steps of it.

    Args:
        config: the model.
        device: where it is.
        way: a key of `WAYS`.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, way: str = "bf16") -> None:
        self.config, self.mesh, self.device = config, Mesh.serial(device=device), device
        self.model = DistributedDataParallel(build_model(config, self.mesh, seed=0), self.mesh)
        settings = OptimizerConfig(lr=1e-4, lr_decay_style="constant")
        self.optimizer = build_optimizer(settings, self.model, self.mesh, kernels=config.kernels)
        schedule = Schedule.from_config(settings, global_batch_size=1, train_iters=10**6)
        self.scheduler = OptimizerParamScheduler(self.optimizer.param_groups, schedule)
        run_passes: Any = StepGraph(1, CudaRecorder(device)) if "graph" in way else forward_backward
        self.options = StepOptions(forward_backward_func=run_passes)
        if "compile" in way:
            for layer in self.model.module.decoder.layers.values():
                layer.compile(dynamic=False)

    def step(self, micro: int, seq_length: int, accumulation: int) -> Callable[[], object]:
        """One optimizer step on random tokens."""
        ids = torch.randint(0, self.config.vocab_size, (micro, seq_length + 1), device=self.device)
        mask = torch.ones(micro, seq_length, device=self.device)
        data = itertools.repeat({"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask})
        objects = (self.model, self.optimizer, self.scheduler)
        return lambda: train_step(forward_step, data, *objects, accumulation, self.options)


def why_not(way: str, device: torch.device) -> str:
    """Why this machine cannot try it; "" when it can."""
    if device.type != "cuda" and ("graph" in way or "compile" in way or "Engine" in way):
        return "it is for GPUs"
    if "Transformer Engine" in way and importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    return ""


def measure(way: str, device: torch.device, smoke: bool, timer: Timer, found: Found) -> Iterator[Yielded]:
    """The step in one way; in the first way also the optimizer by itself, and the micro-batch that others take too.

    The share of a step in bf16 is MFU: of the dense bf16 peak.
    """
    s, sizes, accumulation, repeats = (64, [2], 2, 2) if smoke else (4096, [8, 4, 2, 1], 4, 4)
    config = family_config("llama", **(TINY if smoke else LLAMA_1B), params_dtype="bf16", **WAYS[way])
    training = Training(config, device, way)
    if way == FIRST:
        n = count_parameters(config)
        yield f"Llama of {n / 1e9:.2f} B parameters, sequence {s}, {accumulation} microbatches"
        took = timer(training.optimizer.step, device, repeats)
        rate = 34e-6 * n / took  # norm 4; gradient 4, main 8, moments 16 read and written, bf16 weight 2
        yield Row("norm, clip and AdamW", took, rate, "GB/s", found.share(rate, "copy"))
    largest = found.facts.get("micro-batch", sizes[0])
    sizes = [size for size in sizes if size <= largest]
    micro, took = _largest(training, sizes, s, accumulation, repeats, timer)
    flops = step_flops(config, micro * accumulation, s) / took / 1e9
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if way == FIRST:
        yield {"micro-batch": micro}
    base = found.rows.get(f"training step, {FIRST}")
    against = {FIRST: base.milliseconds / largest / (took / micro)} if base else {}
    share = flops / peak if peak and "FP8" not in way else None
    yield f"micro-batch {micro}, {1e3 * micro * accumulation * s / took:.0f} tokens/s{_memory(device)}"
    yield Row(f"training step, {way}", took, flops, "TFLOP/s", share, against)


def _largest(
    training: Training, sizes: list[int], s: int, accumulation: int, repeats: int, timer: Timer
) -> tuple[int, float]:
    """The first micro-batch that fits, and the milliseconds of a step with it."""
    for micro in sizes:
        try:
            return micro, timer(training.step(micro, s, accumulation), training.device, repeats)
        except torch.OutOfMemoryError:
            print(f"  micro-batch {micro} does not fit", flush=True)
        gc.collect()  # outside of the except clause, whose traceback holds the tensors
        torch.cuda.empty_cache()
    raise RuntimeError(f"no micro-batch of {sizes} fits")


def _memory(device: torch.device) -> str:
    return f", peak memory {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB" if device.type == "cuda" else ""
