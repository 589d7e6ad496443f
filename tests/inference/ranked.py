"""What ranks do in the tests of generation. It imports no Hugging Face, which every rank would have to load."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.generate import continue_prompt, parse
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.errors import MinimegatronError
from minimegatron.inference.adapters import load_adapters
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import Continuation, generate, score
from minimegatron.inference.grammar import Grammars
from minimegatron.inference.loading import load
from minimegatron.inference.paged_cache import PagedCache
from minimegatron.inference.sampling import SamplingParams
from minimegatron.inference.sequence import Request, Sequence
from minimegatron.layers.logical import load_logical
from minimegatron.layers.lora import packed_of
from minimegatron.models.chunks import build_chunks
from minimegatron.models.decoder import GPTModel
from tests.recorder import OnACpu

VOCABULARY = 99
PROMPTS = [[5, 9, 3, 7, 7], [1, 2], [50, 60, 70, 80, 90, 11, 13]]  # with what follows, longer than a window of 7
PIECES = (11, 1, 1, 5, 1, 3, 1, 1)  # a prompt, then single tokens, and now and then several
LENGTH = sum(PIECES)
SPECIAL = ("<eos>", "<bos>", "<ask>", "<say>")


class Words:
    """A vocabulary of JSON: letters, a few longer words, bytes of a character, special ones."""

    longer = ('{"', '":', '",', '"}', "true", "fal", "null", '"a', "]}", "12", "é", "<0xC3>", "<0xA9>", "a")
    spelled = (*(chr(i) for i in range(32, 127) if chr(i) not in "ABCDEFGHIJKLMN"), *longer, *SPECIAL)
    vocab_size, special_ids = VOCABULARY, frozenset(range(VOCABULARY - len(SPECIAL), VOCABULARY))

    def word(self, token: int) -> tuple[str, str]:
        """How it is spelled, and its text alone."""
        spelled = self.spelled[token]
        return spelled, "\ufffd" if spelled.startswith("<0x") else spelled

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one word."""
        spelled = self.spelled[token]
        return bytes([int(spelled[3:5], 16)]) if spelled.startswith("<0x") else spelled.encode()

    def text(self, tokens: list[int]) -> str:
        """Of an answer, without special words."""
        return b"".join(self.bytes_of(token) for token in tokens if token not in self.special_ids).decode()


Weights = tuple[TransformerConfig, dict[str, torch.Tensor]]


def build(config: TransformerConfig, tensors: dict[str, torch.Tensor], **layout: Any) -> Any:
    """Our model in eval mode, on this rank's part of a layout."""
    mesh = Mesh.build(ParallelConfig(**layout))
    model = build_chunks(config, mesh).eval()
    load_logical(model, tensors, stage=mesh.pp.size > 1)
    return model


def ids(b: int, s: int, seed: int = 0) -> torch.Tensor:
    """Random tokens [b, s]."""
    return torch.randint(0, VOCABULARY, (b, s), generator=torch.Generator().manual_seed(seed))


def pages_of(model: GPTModel, sequences: int, tokens: int, page_size: int = 4) -> tuple[PagedCache, list[list[int]]]:
    """Memory for so many sequences, and the pages of each: in no order, with those of the others in between."""
    pages = -(-tokens // page_size)
    weight = next(model.parameters())
    cache = PagedCache(
        model.inference_state(), 1 + sequences * pages, page_size, sequences + 1, weight.dtype, weight.device
    )
    return cache, [[1 + (pages - 1 - i) * sequences + sequence for i in range(pages)] for sequence in range(sequences)]


@torch.inference_mode()
def in_pieces(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position [b, s, V], computed piece by piece."""
    b, at, found = len(tokens), 0, []
    cache, tables = pages_of(model, b, tokens.shape[1])
    for n in PIECES:
        context = cache.context([n] * b, [at] * b, tables, range(1, b + 1))
        row = tokens[:, at : at + n].reshape(1, -1)
        found.append(model.full_logits(row, inference_context=context).view(b, n, -1))
        at += n
    return torch.cat(found, 1)


def pieces_on_ranks(rank: int, world: int, models: list[Weights]) -> list[torch.Tensor]:
    """`in_pieces` of several models over tp."""
    tokens, layout = ids(2, LENGTH), {"tensor_model_parallel_size": world}
    return [in_pieces(build(*model, **layout), tokens) for model in models]


def bytes_on_rank(rank: int, world: int, config: TransformerConfig, tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of the memory for 3 sequences of 16 tokens, and a page for padding."""
    return pages_of(build(config, tensors, tensor_model_parallel_size=world), 3, 16)[0].nbytes


def continuations(
    rank: int, world: int, cases: list[tuple[Weights, dict[str, Any]]], params: list[SamplingParams]
) -> list[list[list[Continuation]]]:
    """What the prompts become, for each model and layout and each way to draw."""
    built = [build(*model, **layout) for model, layout in cases]
    return [[generate(model, PROMPTS, 12, each, seed=5) for each in params] for model in built]


def run(engine: Engine, requests: dict[str, Request], every: int = 0) -> dict[str, list[Sequence]]:
    """Requests arrive `every` so many steps: name -> sequences; all pages are free at the end."""
    found: dict[str, list[Sequence]] = {}
    for name, request in requests.items():
        engine.add_request(request, name)
        found[name] = engine.sequences[name]
        for _ in range(every):
            engine.step()
    while engine.has_work:
        engine.step()
    blocks = engine.scheduler.blocks
    blocks.check([])
    assert blocks.available == blocks.capacity and not engine.sequences
    return found


class Answers(NamedTuple):
    """What an engine on several ranks has made, on rank 0; and whether it had to preempt, and found pages."""

    answers: dict[str, list[Sequence]]
    preempted: int
    hits: int


def answers_on_ranks(
    rank: int, world: int, model: Weights, layout: dict[str, Any], config: EngineConfig, requests: dict[str, Request]
) -> Answers | None:
    """Requests, and then the same once more."""
    engine = Engine(build(*model, **layout), config)
    if not engine.runner.leads:
        engine.follow()
        return None
    run(engine, requests)
    found = run(engine, requests)
    engine.stop()
    return Answers(found, engine.scheduler.preemptions, engine.scheduler.blocks.hits)


def pages_of_stages(rank: int, world: int, model: Weights, config: EngineConfig) -> tuple[int, int, list[int]]:
    """Pages and bytes of a stage, the first with one layer, and a continuation of 10 tokens that fills them."""
    layout = {"pipeline_model_parallel_size": world, "num_layers_in_first_pipeline_stage": 1}
    engine = Engine(build(*model, **layout), config)
    made = generate(engine, [[5, 9, 3, 7, 7, 50, 60, 5, 9, 3]], 12)
    return engine.scheduler.blocks.num_pages, engine.runner.cache.nbytes, made[0].tokens


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
    models = [build_chunks(config, Mesh.build(ParallelConfig(**layout))).eval() for config, layout in cases]
    return [error_of(lambda model=model: generate(model, PROMPTS, 2)) for model in models]  # type: ignore[misc]


def unrecordable(rank: int, world: int, model: Weights) -> str:
    """The error of a recorder over tp."""
    built = build(*model, tensor_model_parallel_size=world)
    return error_of(lambda: Engine(built, recorder=OnACpu()))


@torch.no_grad()
def logits_of_folder(rank: int, world: int, folder: Path) -> torch.Tensor:
    """What a model in a folder says over tp."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    return load(open_model(folder), mesh, "fp32").full_logits(ids(2, 12))


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


def scores(
    rank: int, world: int, cases: list[tuple[Weights, dict[str, Any]]], sequences: list[tuple[list[int], list[int]]]
) -> list[list[list[float]]]:
    """Log-probabilities of continuations, for each model and layout; in chunks, and again from pages."""
    found = []
    for model, layout in cases:
        engine = Engine(
            build(*model, **layout), EngineConfig(64, page_size=4, max_num_seqs=3, max_num_batched_tokens=5)
        )
        found += [score(engine, sequences), score(engine, sequences)]
    return found


def speculated(
    rank: int,
    world: int,
    models: list[Weights],
    layout: dict[str, Any],
    config: EngineConfig,
    requests: list[Request],
    words: Words | None = None,
) -> dict[tuple[int, int], list[int]] | None:
    """(request, answer) -> its words, on rank 0; the second model, if any, is the draft model."""
    model, *draft = [build(*each, **layout) for each in models]
    grammars = Grammars(words, VOCABULARY) if words else None
    engine = Engine(model, config, draft=draft[0] if draft else None, grammars=grammars)
    if not engine.runner.leads:
        engine.follow()
        return None
    found = {}
    for i, request in enumerate(requests):
        engine.add_request(request, str(i))
        found |= {(i, sequence.index): sequence for sequence in engine.sequences[str(i)]}
    while engine.has_work:
        engine.step()
    engine.stop()
    return {key: sequence.answer for key, sequence in found.items()}


def adapted_answers(
    rank: int,
    world: int,
    base: Path,
    adapters: dict[str, Path],
    layout: dict[str, Any],
    config: EngineConfig,
    requests: dict[str, Request],
) -> dict[str, tuple[list[int], list[float]]] | None:
    """name -> (words, log-probabilities) of requests that choose adapters, on rank 0."""
    opened = open_model(base)
    model = load(opened, Mesh.build(ParallelConfig(**layout)), "fp32")
    engine = Engine(model, config, adapters=load_adapters(model, opened, adapters))
    if not engine.runner.leads:
        engine.follow()
        return None
    found = run(engine, requests)
    engine.stop()
    return {name: (sequence.answer, sequence.log_probs) for name, (sequence,) in found.items()}


def packed_words(rank: int, world: int, folder: Path) -> tuple[list[Continuation], int]:
    """(greedy answers of a quantised folder over tp, how many of its matrices are packed)."""
    model = load(open_model(folder), Mesh.build(ParallelConfig(tensor_model_parallel_size=world)), "fp32")
    found = generate(Engine(model, EngineConfig(64, max_num_seqs=2, max_num_batched_tokens=8)), PROMPTS, 12)
    return found, len(packed_of(model))
