"""The first batch of a run, of which each rank keeps every tensor: outputs of modules, their gradients, what is
recomputed.

The model is that of step 0, without dropout. A rank keeps all activations of the batch and their gradients: compare
small models. Rows of experts lie in another order in every layout, so the numbers of their tokens are sent through the
same dispatcher, and a row is known by (expert, token).

| message                      | axis                  | bytes                                        |
|------------------------------|-----------------------|----------------------------------------------|
| numbers of dispatched tokens | those of a dispatcher | as `layers/moe/dispatch` of rows of length 1 |
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Dataset
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.moe.router import Routing
from minimegatron.layers.param import logical_name
from minimegatron.layers.recompute import MICROBATCH
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.spec import spec_from_name
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.comparison.twin_parts import places_of
from minimegatron.training.datasets import microbatches
from minimegatron.training.observers.checks import Gradients, finished, ready, shake
from minimegatron.training.probe import Place, Probe
from minimegatron.training.step import ForwardStep, get_forward_backward_func

_ROW = 1 << 40  # more than there are tokens: key of a row = expert * _ROW + token


@dataclasses.dataclass
class Seen:
    """What one run has computed on this rank.

    Attributes:
        tensors: every output, gradient and recomputed output.
        rows: (module of experts, microbatch) -> key of each row.
        modules: name -> module.
        gradients: losses, model and norm at the end.
    """

    tensors: dict[Place, torch.Tensor] = dataclasses.field(default_factory=dict)
    rows: dict[tuple[str, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    modules: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: Gradients | None = None

    def see(self, place: Place, tensor: torch.Tensor, module: Any) -> None:
        """Keep a tensor; it may be changed in place later, so a copy."""
        self.tensors[place] = tensor.clone()
        self.modules[place.module] = module


def own_model(run: RunConfig, mesh: Mesh) -> DataParallel:
    """The model of a run at step 0 in its own precision and by its own kernels, without dropout: the weights of
    `model_in_fp64`."""
    config = run.model.replace(hidden_dropout=0.0, attention_dropout=0.0, lora_base=None)
    model = build_model_chunks(config, mesh, run.training.seed, spec_from_name(run.spec, config))
    shake(model, run.training.seed)
    return ready(run, model, mesh, run.optimizer.grad_dtype)


def first_batch(
    run: RunConfig,
    ddp: DataParallel,
    dataset: Dataset,
    batch_size: int,
    forward_step: ForwardStep,
) -> Seen:
    """Run the first batch in the layout of the model, and keep all of it."""
    mesh, size, seen = ddp.mesh, run.training.micro_batch_size, Seen()
    probe = Probe(ddp, seen.see)
    batches = microbatches(dataset, size, mesh, 0, mesh.device)
    hooks, passes = StepHooks(ddp, mesh), get_forward_backward_func(ddp)
    count = batch_size // (size * mesh.dp.size)
    with probe.watching(), dispatched_tokens(ddp, run, seen.rows), hooks.passes(1.0):
        tokens, reports = passes(probe.of(forward_step), batches, ddp, count, lambda loss: loss)
    seen.gradients = finished(run, ddp, tokens, reports | hooks.reports())
    return seen


@contextlib.contextmanager
def dispatched_tokens(
    model: torch.nn.Module, run: RunConfig, rows: dict[tuple[str, int], torch.Tensor]
) -> Iterator[None]:
    """In the block `rows` gets the keys of what every layer's experts are sent.

    A layer's dispatcher sends the numbers of the tokens as it sends the tokens, in a context of its own: what the host
    reads there is not what the layer reads.
    """

    def after(name: str, layer: MoELayer) -> Callable[..., None]:
        mesh, b, s = layer.mesh, run.training.micro_batch_size, run.data.seq_length

        @torch.no_grad()
        def hook(module: Any, args: Any, routing: Routing) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # recomputed
            number = MICROBATCH.get(0)
            first = (number * mesh.dp.size + mesh.dp.rank) * b
            samples = torch.arange(first, first + b, device=mesh.device)
            tokens = (places_of(s, mesh, mesh.sequence_parallel)[:, None] + s * samples).flatten()[:, None].double()
            alike = Routing(routing.probs.double(), routing.map)
            sent = contextvars.Context().run(lambda: layer.dispatcher.dispatch(tokens, alike)())
            experts = torch.arange(*layer.experts.here, device=mesh.device)
            of_row = experts.repeat_interleave(torch.tensor(sent.counts, device=mesh.device))
            rows[f"{name}.experts", number] = of_row * _ROW + sent.rows[:, 0].round().long()

        return hook

    hooks = [
        layer.router.register_forward_hook(after(logical_name(name), layer))
        for name, layer in model.named_modules()
        if isinstance(layer, MoELayer)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
