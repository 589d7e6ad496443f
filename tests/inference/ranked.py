"""What ranks do in the tests of generation. It imports no Hugging Face, which every rank would have to load."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.commands.generate import continue_prompt, parse
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.errors import MinimegatronError
from minimegatron.inference.generate import Continuation, StaticEngine, generate
from minimegatron.inference.sampling import SamplingParams
from minimegatron.inference.static_cache import StaticCache
from minimegatron.layers.logical import load_logical
from minimegatron.models.decoder import GPTModel
from tests.recorder import OnACpu

VOCABULARY = 99
PROMPTS = [[5, 9, 3, 7, 7], [1, 2], [50, 60, 70, 80, 90, 11, 13]]  # with what follows, longer than a window of 7
PIECES = (11, 1, 1, 5, 1, 3, 1, 1)  # a prompt, then single tokens, and now and then several
LENGTH = sum(PIECES)
Weights = tuple[TransformerConfig, dict[str, torch.Tensor]]


def build(config: TransformerConfig, tensors: dict[str, torch.Tensor], **layout: Any) -> GPTModel:
    """Our model in eval mode, on this rank's part of a layout."""
    model = GPTModel(config, Mesh.build(ParallelConfig(**layout))).eval()
    load_logical(model, tensors)
    return model


def ids(b: int, s: int, seed: int = 0) -> torch.Tensor:
    """Random tokens [b, s]."""
    return torch.randint(0, VOCABULARY, (b, s), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def in_pieces(model: GPTModel, tokens: torch.Tensor, key_length: bool = False) -> torch.Tensor:
    """Logits of every position [b, s, V], computed piece by piece."""
    cache, at, found = StaticCache(model, len(tokens), tokens.shape[1]), 0, []
    for n in PIECES:
        view = cache.decode(n, at + n if key_length else None) if at else cache.prefill(n)
        found.append(model.full_logits(tokens[:, at : at + n], inference_context=view))
        cache.advance(n)
        at += n
    return torch.cat(found, 1)


def pieces_on_ranks(rank: int, world: int, models: list[Weights]) -> list[torch.Tensor]:
    """`in_pieces` of several models over tp."""
    tokens, layout = ids(2, LENGTH), {"tensor_model_parallel_size": world}
    return [in_pieces(build(*model, **layout), tokens) for model in models]


def bytes_on_rank(rank: int, world: int, config: TransformerConfig, tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of a cache for 3 sequences of 16 tokens."""
    return StaticCache(build(config, tensors, tensor_model_parallel_size=world), 3, 16).nbytes


def continuations(rank: int, world: int, model: Weights, params: list[SamplingParams]) -> list[list[Continuation]]:
    """What the prompts become over tp."""
    built = build(*model, tensor_model_parallel_size=world)
    return [generate(built, PROMPTS, 12, each, seed=5) for each in params]


def error_of(run: Callable[[], object]) -> str:
    """What it raises, in words."""
    try:
        run()
    except MinimegatronError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def different_questions(rank: int, world: int, model: Weights) -> str:
    """The error of ranks that were asked for different things."""
    built = build(*model, tensor_model_parallel_size=world)
    return error_of(lambda: generate(built, PROMPTS, 2, seed=rank))


def refusals(rank: int, world: int, cases: list[tuple[TransformerConfig, dict[str, Any]]]) -> list[str]:
    """The errors of layouts that cannot generate."""
    models = [GPTModel(config, Mesh.build(ParallelConfig(**layout))).eval() for config, layout in cases]
    return [error_of(lambda model=model: generate(model, PROMPTS, 2)) for model in models]  # type: ignore[misc]


def unrecordable(rank: int, world: int, model: Weights) -> str:
    """The error of a recorder over tp."""
    built = build(*model, tensor_model_parallel_size=world)
    return error_of(lambda: StaticEngine(built, 16, OnACpu()))


def asked(rank: int, world: int, lines: list[list[str]]) -> list[tuple[str, str]]:
    """What `minimegatron generate` prints for each command line: (the text, what is said beside it or the error)."""
    answers = []
    for line in lines:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
            error = error_of(lambda line=line: continue_prompt(parse(line)))  # type: ignore[misc]
        answers.append((out.getvalue(), said.getvalue() if error == "nothing happened" else error))
    return answers


def example(rank: int, world: int, lines: list[list[str]]) -> list[str]:
    """What `minimegatron generate` prints for each command line, or the error it ends with."""
    errors = "ConfigError", "CheckpointError"
    return [said if said.startswith(errors) else text for text, said in asked(rank, world, lines)]
