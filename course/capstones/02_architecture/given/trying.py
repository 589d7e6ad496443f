"""For a hand-in's own tests, and for its judge: a small model of an architecture, and what can be asked of it.

    from course.capstone02.trying import first_step, from_states, model_of, ranks

    model = model_of()                              in fp64, in this process; norms are not 1, biases not 0
    ranks(2).run(first_step, "--tensor-model-parallel-size 2")
                                                    every gradient is that of one process, or a RankError says which not
    from_states(model, tokens)                      logits that generation computes, a piece at a time

The architecture is `layers` of the module `architecture`, the first one in `sys.path`. Flags are those of
`minimegatron train`; where none are given the sizes are `SIZES`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import torch

from labkit.ranks.pool import shared_pool as ranks
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.inference.paged_cache import PagedCache
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.decoder import GPTModel
from minimegatron.models.spec import spec_from_name
from minimegatron.training.arguments import parse_args
from minimegatron.training.observers.checks import check_first_step, shake
from minimegatron.training.step import forward_step

__all__ = ["Drawn", "first_step", "from_states", "model_of", "ranks", "run_of"]

SIZES = (
    "--mock-data --spec architecture layers --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--ffn-hidden-size 48 --vocab-size 50 --seq-length 16 --max-position-embeddings 64 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--make-vocab-size-divisible-by 4 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.15 "
    "--micro-batch-size 2 --global-batch-size 4"
)
PIECES = (7, 1, 1, 4, 1, 2)  # a prompt, then single tokens, and now and then several
PAGE = 4


def run_of(flags: str = "", world: int = 1) -> RunConfig:
    """The configuration of a run with these flags more.

    Raises:
        ConfigError: flags that contradict each other, or that do not exist.
    """
    return parse_args(shlex.split(f"{SIZES} {flags}"), world)


def model_of(flags: str = "", mesh: Mesh | None = None) -> GPTModel:
    """The model in fp64, in this process; or this rank's part of it."""
    run = run_of(flags, 1 if mesh is None else mesh.world.size)
    spec = spec_from_name(run.spec, run.model)
    model = build_model_chunks(run.model, mesh or Mesh.serial(), run.training.seed, spec)
    shake(model, run.training.seed)
    return model.double()  # type: ignore[no-any-return]


class Drawn(Dataset):
    """Samples of random tokens, of which unequally many count; the same ones in every layout.

    Args:
        vocabulary: tokens are below.
        length: tokens of a sample.
        seed: of all of them.
    """

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.vocabulary, self.length, self.seed = vocabulary, length, seed

    def __len__(self) -> int:
        return 1 << 30

    def batch(self, samples: Sequence[int]) -> Batch:
        """{"tokens", "labels", "loss_mask"}, [b, s] each."""
        rows, masks = [], []
        for sample in samples:
            drawn = torch.Generator().manual_seed(self.seed * 1_000_003 + sample)
            rows.append(torch.randint(0, self.vocabulary, (self.length + 1,), generator=drawn))
            share = 0.3 + 0.6 * torch.rand((), generator=drawn)
            masks.append((torch.rand(self.length, generator=drawn) < share).float())
        ids = torch.stack(rows)
        return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": torch.stack(masks)}

    def read_epochs(self, samples: int) -> dict[str, float]:
        return {}

    def begun(self, first: int, end: int) -> dict[str, int]:
        return {}


def data_of(run: RunConfig) -> Drawn:
    """Samples for a run: its vocabulary, its length, its seed."""
    return Drawn(run.model.vocab_size, run.data.seq_length, run.training.seed)


def first_step(rank: int, world: int, flags: str) -> str:
    """On each rank: the gradients of the first batch in a layout, beside those of one process, in fp64.

    Returns:
        A line with the largest difference.

    Raises:
        RankError: they differ: how many, by how much, and which of them is closest to the loss.
    """
    run = run_of(flags, world)
    assert run.training.global_batch_size is not None
    return check_first_step(run, Mesh.build(run.parallel), data_of(run), run.training.global_batch_size, forward_step)


@torch.inference_mode()
def from_states(model: GPTModel, tokens: torch.Tensor, pieces: Sequence[int] = PIECES, left: float = 0.0) -> Any:
    """Logits of every position [b, s, V], computed piece by piece from what layers keep.

    Args:
        model: on whatever ranks.
        tokens: [b, s], s the sum of the pieces.
        pieces: how many new tokens each pass has.
        left: what an earlier sequence has left in the memory, everywhere.
    """
    b, pages, weight = len(tokens), -(-tokens.shape[1] // PAGE), next(model.parameters())
    cache = PagedCache(model.inference_state(), 1 + b * pages, PAGE, b + 1, weight.dtype, weight.device)
    for buffers in cache.layers.values():
        for buffer in buffers.values():
            buffer.fill_(left)
    tables = [[1 + i * b + row for i in range(pages)] for row in range(b)]
    at, found = 0, []
    for new in pieces:
        context = cache.context([new] * b, [at] * b, tables, range(1, b + 1))
        row = tokens[:, at : at + new].reshape(1, -1)
        found.append(model.full_logits(row, inference_context=context).view(b, new, -1))
        at += new
    return torch.cat(found, 1)
