"""Log-probabilities of given tokens by a model in any layout, without a gradient.

A trained model scores for three purposes: the reference of a preference loss, the policy that drew an answer, and the
comparison with the engine that drew it. All use the forward pass of training, so that the numbers differ from those of
the next step by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minimegatron.comm.agree import gather_objects
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

Forward = Callable[[Batch, Any], Any]  # (batch, model) -> what the model gives
Numbers = Callable[[Batch, Any], torch.Tensor]  # (batch, that) -> [b, s / cp, ...] in fp32


@torch.no_grad()
def token_numbers(
    model: DataParallel,
    batch_of: Callable[[Sequence[int]], Batch],
    rows: int,
    micro_batch_size: int,
    forward: Forward,
    numbers: Numbers,
    what: str = "",
) -> torch.Tensor:
    """Numbers of every token of some rows, on all ranks; all ranks call it.

    Args:
        model: in its data-parallel wrapper.
        batch_of: the batch of rows by their numbers, the same on all ranks.
        rows: how many rows there are.
        micro_batch_size: rows of one forward pass.
        forward: calls the model.
        numbers: of what it gives, on the last stage.
        what: name of a progress bar, shown on rank 0 if it takes long; "" for none.

    Returns:
        [rows, s, ...] in fp32 on the host; what a mask excludes is there too.
    """
    mesh = model.mesh
    together = micro_batch_size * mesh.dp.size
    rounds = -(-rows // together)
    found: list[torch.Tensor] = []

    def rows_of(index: int) -> list[int]:  # the last round repeats the last row
        first = index * together + mesh.dp.rank * micro_batch_size
        return [min(first + i, rows - 1) for i in range(micro_batch_size)]

    def batches() -> Iterator[Batch]:
        bar = progress_bar(rounds, what, bool(what) and mesh.rank == 0)
        for index in range(rounds):
            yield to_device(cut_batch(batch_of(rows_of(index)), mesh), mesh.device)
            bar.update()
        bar.close()

    def forward_step(data_iterator: Iterator[Batch], stage: Any) -> tuple[Any, Callable[[Any], Loss]]:
        batch = next(data_iterator)

        def keep(output: Any) -> Loss:
            found.append(numbers(batch, output))
            zero = torch.zeros((), device=mesh.device)
            return zero, zero, {}

        return forward(batch, stage), keep

    with eval_mode(model):
        forward_passes(forward_step, batches(), model, rounds)
    return _on_all_ranks(found, mesh, rows)


def _on_all_ranks(found: list[torch.Tensor], mesh: Mesh, rows: int) -> torch.Tensor:
    """[rows, s, ...] from the rounds of the last stages, [b, s / cp, ...] each."""
    scores = torch.stack(found) if found else torch.zeros(0, device=mesh.device)  # [rounds, b, s / cp, ...]
    if mesh.pp.size > 1:
        shape = next(shape for shape in gather_objects(tuple(scores.shape) if found else None, mesh.pp) if shape)
        scores = all_reduce(scores if found else torch.zeros(shape, device=mesh.device), mesh.pp)
    scores = gather_tokens(scores, mesh, 2)
    everyone = all_gather(scores[None].contiguous(), mesh.dp)  # [dp, rounds, b, s, ...]
    return everyone.transpose(0, 1).flatten(0, 2)[:rows].cpu()


def log_probs(
    model: DataParallel,
    config: TransformerConfig,
    batch_of: Callable[[Sequence[int]], Batch],
    rows: int,
    micro_batch_size: int,
    what: str = "",
    temperature: float = 1.0,
) -> torch.Tensor:
    """The log-probability of every label of some rows, [rows, s]: `token_numbers` of them.

    Args:
        config: the model's.
        temperature: T of softmax(logits / T).
    """

    def numbers(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        return label_log_probs(logits, batch["labels"], model.mesh, config, temperature)

    return token_numbers(model, batch_of, rows, micro_batch_size, logits_of, numbers, what)


def logits_of(batch: Batch, model: Any) -> Any:
    """What the model gives for a batch."""
    return model(batch["tokens"], batch["position_ids"], document_ids=batch.get("document_ids"))


def values_of(batch: Batch, model: Any) -> Any:
    """The values of a batch, of a model with a value head."""
    return model(batch["tokens"], batch["position_ids"], document_ids=batch.get("document_ids"), outputs="values")


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
