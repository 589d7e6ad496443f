"""Log-probabilities of given tokens by a model in any layout, without a gradient.

A trained model scores for three purposes: the reference of a preference loss, the policy that drew an answer, and the
comparison with the engine that drew it. All use the forward pass of training, so that the numbers differ from those of
the next step by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import cut_batch, gather_tokens
from minimegatron.config import TransformerConfig
from minimegatron.data.gpt_dataset import Batch
from minimegatron.data.indices import progress_bar
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.datasets import to_device
from minimegatron.training.observers.evaluation import eval_mode, forward_passes
from minimegatron.training.step import Loss


@torch.no_grad()
def log_probs(
    model: DataParallel,
    config: TransformerConfig,
    batch_of: Callable[[Sequence[int]], Batch],
    rows: int,
    micro_batch_size: int,
    what: str = "",
    temperature: float = 1.0,
) -> torch.Tensor:
    """The log-probability of every label of some rows, on all ranks; all ranks call it.

    Args:
        model: in its data-parallel wrapper.
        config: the model's.
        batch_of: the batch of rows by their numbers, the same on all ranks.
        rows: how many rows there are.
        micro_batch_size: rows of one forward pass.
        what: name of a progress bar, shown on rank 0 if it takes long; "" for none.
        temperature: T of softmax(logits / T).

    Returns:
        [rows, s] in fp32 on the host; what a mask excludes is there too.
    """
    mesh = model.mesh
    together = micro_batch_size * mesh.dp.size
    rounds = -(-rows // together)
    found: list[torch.Tensor] = []

    def numbers(index: int) -> list[int]:  # the last round repeats the last row
        first = index * together + mesh.dp.rank * micro_batch_size
        return [min(first + i, rows - 1) for i in range(micro_batch_size)]

    def batches() -> Iterator[Batch]:
        bar = progress_bar(rounds, what, bool(what) and mesh.rank == 0)
        for index in range(rounds):
            yield to_device(cut_batch(batch_of(numbers(index)), mesh), mesh.device)
            bar.update()
        bar.close()

    with eval_mode(model):
        forward_passes(partial(_forward_step, found, config, temperature), batches(), model, rounds)
    if not found:  # a stage before the last
        s = batch_of([0])["tokens"].shape[1]
        found = [torch.zeros(micro_batch_size, s // mesh.cp.size, device=mesh.device) for _ in range(rounds)]
    scores = torch.stack(found)  # [rounds, b, s / cp]
    scores = gather_tokens(all_reduce(scores, mesh.pp), mesh, 2)
    everyone = all_gather(scores[None].contiguous(), mesh.dp)  # [dp, rounds, b, s]
    return everyone.transpose(0, 1).flatten(0, 2)[:rows].cpu()


def label_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, mesh: Mesh, config: TransformerConfig, temperature: float = 1.0
) -> torch.Tensor:
    """The log-probability of each label at a temperature, [b, s], from logits [s, b, V'/t] and labels [b, s]."""
    losses = vocab_parallel_cross_entropy(
        logits if temperature == 1.0 else logits / temperature,
        labels.t(),
        mesh.tp,
        vocab_size=config.vocab_size,
        kernels=config.kernels,
    )
    return -losses.t()


def _forward_step(
    found: list[torch.Tensor],
    config: TransformerConfig,
    temperature: float,
    data_iterator: Iterator[Batch],
    model: Any,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], document_ids=batch.get("document_ids"))

    def keep(logits: torch.Tensor) -> Loss:
        found.append(label_log_probs(logits, batch["labels"], model.mesh, config, temperature))
        return logits.new_zeros(()), logits.new_zeros(()), {}

    return output, keep
