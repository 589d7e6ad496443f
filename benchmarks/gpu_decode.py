"""Decoding at batch 1 on one GPU: a Llama with 1.2 B parameters in bf16, as it is, compiled, and as one CUDA graph.

What a step costs at least is reading: every weight once (of an untied embedding one row), and all pages of the cache.
The rate is these bytes a second, its share that of the copy bandwidth, which counts bytes read and written. A step is
embedding to drawn word, 16 of them timed together. Before a way is timed, the log-probabilities of its words are
compared with the first way's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_parts import Found, Row, Yielded
from benchmarks.gpu_training import LLAMA_1B, TINY, Timer
from minimegatron.comm.mesh import Mesh
from minimegatron.cuda_graphs import Recorder
from minimegatron.inference.paged_cache import PagedCache
from minimegatron.inference.plan import Batch, Draw
from minimegatron.inference.runner import RecordedStep, Runner
from minimegatron.inference.sampling import GREEDY, Rows
from minimegatron.models.chunks import count_parameters
from minimegatron.models.decoder import GPTModel, build_model
from minimegatron.models.families import family_config

STEPS, CONTEXT, PAGE, TOLERANCE = 16, 512, 16, 0.05
# name -> whether the step is recorded, and whether it is compiled; the first is what the others are compared with
WAYS: dict[str, tuple[bool, bool]] = {
    "": (False, False),
    ", one CUDA graph": (True, False),
    ", compiled, one CUDA graph": (True, True),
}


class Decoding:
    """A model that has read a prompt, and steps from there.

    Args:
        model: in eval mode.
        context: tokens of prompt and answer.
        recorder, compiled: how it steps, see `Runner`.
    """

    def __init__(self, model: GPTModel, context: int, recorder: Recorder | None, compiled: bool) -> None:
        weight, pages = next(model.parameters()), -(-context // PAGE)
        self.context, self.pages = context, tuple(range(1, pages + 1))
        self.cache = PagedCache(model.inference_state(), pages + 1, PAGE, 2, weight.dtype, weight.device)
        self.rows = Rows.of([GREEDY], weight.device)
        self.step = RecordedStep(Runner(model, self.cache, pages, recorder, compiled), self.rows)
        generator = torch.Generator(model.mesh.device).manual_seed(0)
        for buffers in self.cache.layers.values():  # a prompt of random numbers is as long as any other
            for buffer in buffers.values():
                buffer.normal_(generator=generator)

    def __call__(self) -> list[float]:
        """Log-probabilities of the same `STEPS` words each time, which come to stand in the last rows of the pages."""
        token = 1
        said: list[float] = []
        for place in range(self.context - STEPS, self.context):
            made = self.step(Batch((token,), (1,), (place,), (self.pages,), (1,), (0,), (Draw(0, GREEDY),)), self.rows)
            token = made.tokens[0]
            said.append(made.log_probs[0])
        return said


def by_torch_alone(model: GPTModel) -> GPTModel:
    """The same weights without our kernels, which torch.compile could not fuse with what stands around them."""
    with torch.device("meta"):
        twin = GPTModel(model.config.replace(kernels="torch"), model.mesh)
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval().to(model.mesh.device)


def bytes_of_a_step(model: GPTModel, run: Decoding) -> int:
    """What one step cannot avoid to read."""
    config = model.config
    weights = count_parameters(config) * config.dtype.itemsize
    if config.untie_embeddings_and_output_weights:
        weights -= (config.vocab_size - 1) * config.hidden_size * config.dtype.itemsize
    return weights + run.cache.nbytes * len(run.pages) // (len(run.pages) + 1)  # without the page for padding


def measure(
    device: torch.device,
    smoke: bool,
    timer: Timer,
    recorders: Callable[[], Recorder] | None,
    compiled: bool,
    found: Found,
) -> Iterator[Yielded]:
    """A word in each way that is compiled, or in each that is not; the first way comes before either.

    Args:
        recorders: makes what records, on a GPU; None leaves the recorded ways out.

    Raises:
        RuntimeError: a way gives other log-probabilities than the first; those before it have been yielded.
    """
    sizes: dict[str, Any] = TINY if smoke else LLAMA_1B
    model = build_model(family_config("llama", **sizes, params_dtype="bf16"), Mesh.serial(device=device), seed=0).eval()
    context, repeats = (32, 2) if smoke else (CONTEXT, 20)
    base: float | None = None
    wanted: torch.Tensor | None = None
    for way, (recorded, fused) in WAYS.items():
        if (recorded and recorders is None) or (way and fused != compiled):
            continue
        stepping = by_torch_alone(model) if fused else model
        run = Decoding(stepping, context, recorders() if recorded and recorders is not None else None, fused)
        run()
        said = torch.tensor(run())
        wanted = said if wanted is None else wanted
        off = (said - wanted).abs().max().item()
        # On a GPU a graph plays the same kernels; otherwise torch alone computes, which rounds elsewhere.
        if not off <= (TOLERANCE if fused or device.type == "cpu" else 0.0):
            raise RuntimeError(f"decode{way}: log-probabilities are off by {off}: {said.tolist()}, {wanted.tolist()}")
        took = timer(run, device, repeats) / STEPS
        base = base or took
        if compiled and not way:
            continue  # another part's row
        rate = bytes_of_a_step(model, run) / took / 1e6
        yield f"{1e3 / took:.0f} tokens/s{way}"
        against = {"no graph": base / took} if way else {}
        yield Row(f"decode, batch 1{way}", took, rate, "GB/s", found.share(rate, "copy"), against)
