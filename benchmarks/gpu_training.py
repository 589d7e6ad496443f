"""Whole training steps of a Llama with 1.2 B parameters on one GPU, in several ways, one after the other.

Sequence 4096, fp32 main parameters, gradients and moments, no recompute. The micro-batch is the largest of a list that
fits in bf16; the other ways train on the same. FP8 is compared with bf16 by time: its share is of nothing, for MFU is a
share of the bf16 peak.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, TransformerConfig
from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import count_parameters, family_config
from minimegatron.optim.optimizer import build_optimizer
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.parallel.ddp import DistributedDataParallel
from minimegatron.training.flops import step_flops
from minimegatron.training.graphs import StepGraph
from minimegatron.training.step import forward_backward, forward_step, train_step

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
        self.passes: Any = StepGraph(1, CudaRecorder(device)) if "graph" in way else forward_backward
        if "compile" in way:
            for layer in self.model.module.decoder.layers.values():
                layer.compile(dynamic=False)

    def step(self, micro: int, seq_length: int, accumulation: int) -> Callable[[], object]:
        """One optimizer step on random tokens."""
        ids = torch.randint(0, self.config.vocab_size, (micro, seq_length + 1), device=self.device)
        mask = torch.ones(micro, seq_length, device=self.device)
        data = itertools.repeat({"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask})
        objects = (self.model, self.optimizer, self.scheduler, self.mesh)
        return lambda: train_step(forward_step, data, *objects, num_microbatches=accumulation, passes=self.passes)


def possible(way: str, device: torch.device) -> bool:
    """Whether this machine can try it; graphs and torch.compile are not for a smoke run."""
    if "Transformer Engine" in way:
        return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    return device.type == "cuda" or not ("graph" in way or "compile" in way)


def measure(
    device: torch.device, smoke: bool, timer: Timer, seconds_left: Callable[[], float]
) -> Iterator[tuple[str, float, float, float | None]]:
    """(what, milliseconds, work a second in FLOPs or bytes, times bf16 or None) of the optimizer and of every way."""
    s, sizes, accumulation, repeats = (64, [2], 2, 2) if smoke else (4096, [8, 4, 2, 1], 4, 6)
    base, micro = None, 0
    for way, fields in WAYS.items():
        if not possible(way, device):
            continue
        if base is not None and seconds_left() < 60:
            print(f"{way}: left out, the time is up", flush=True)
            continue
        config = family_config("llama", **(TINY if smoke else LLAMA_1B), params_dtype="bf16", **fields)
        try:
            training = Training(config, device, way)
            if base is None:
                n = count_parameters(config)
                print(f"Llama of {n / 1e9:.2f} B parameters, sequence {s}, {accumulation} microbatches", flush=True)
                took = timer(training.optimizer.step, device, repeats)
                # norm 4; gradient 4, main 8, moments 16 read and written, bf16 weight 2
                yield "norm, clip and AdamW", took, 34.0 * n / took * 1e3, None
                micro, took = _largest(training, sizes, s, accumulation, repeats, timer)
            else:
                took = timer(training.step(micro, s, accumulation), device, repeats)
        except Exception as error:
            if base is None:  # without the first there is nothing to compare with
                raise
            print(
                f"{way}: FAILED, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True
            )
            continue
        finally:
            training = None  # type: ignore[assignment]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        base = base or took
        flops = step_flops(config, micro * accumulation, s) / took * 1e3
        print(
            f"{way}: micro-batch {micro}, {1e3 * micro * accumulation * s / took:.0f} tokens/s{_memory(device)}",
            flush=True,
        )
        yield f"training step, {way}", took, flops, None if way == "bf16" else base / took


def _largest(
    training: Training, sizes: list[int], s: int, accumulation: int, repeats: int, timer: Timer
) -> tuple[int, float]:
    """The first micro-batch that fits, and the milliseconds of a step with it."""
    for micro in sizes:
        try:
            return micro, timer(training.step(micro, s, accumulation), training.device, repeats)
        except torch.OutOfMemoryError:
            print(f"micro-batch {micro} does not fit", flush=True)
            torch.cuda.empty_cache()
    raise SystemExit("no micro-batch fits")


def _memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return f", peak memory {peak / 1e9:.1f} GB"
