"""Prompts in, continuations out: which models can generate, the decode step, and the loop around it.

    prefill   all prompts at once, padded on the right           -> the first new token of each
    decode    one token of each sequence, again and again        -> until all have stopped, or enough are there

A sequence that has stopped goes on being computed, because shapes stay as they are; its tokens after the stop are
dropped. (To put another prompt in its place is continuous batching, which wants pages instead of rows.)

**The decode step** is a function without arguments. It reads and writes tensors that stay where they are:

| place        | shape     | read as                     | written                                       |
|--------------|-----------|-----------------------------|-----------------------------------------------|
| `tokens`     | [b] int64 | the newest token            | by the step: the one it draws                 |
| positions    | [b] int64 | its place (`static_cache`)  | by the step: plus 1                           |
| `uniform`    | [b] fp64  | the draw (`sampling`)       | by the host, before each step                 |
| the cache    | [m, b, .] | keys and values             | by the step: row `position`                   |

At batch 1 a step of a 1 B-parameter model reads 2 GB, for which a GPU of 4.8 TB/s needs 0.42 milliseconds; in that time
Python cannot launch the hundreds of kernels that do so. A CUDA graph of the step, from embedding to draw, can: the host
copies b numbers a step. One recording serves every position; another number of sequences or other sampling parameters
need another one. `compiled` has torch.compile fuse the small kernels between two matrices, once for a shape, which also
helps on a CPU.

Tokens stay on the device, where the next step reads them. The host looks at them only to see whether all have stopped:
after every step, or with a recording after every 16, which costs at most 15 steps too many and changes nothing in what
is returned.

| refused                        | why                                                                                |
|--------------------------------|------------------------------------------------------------------------------------|
| sequence parallelism           | one token cannot be cut                                                            |
| cp, pp, ep                     | ranks that wait for each other at every token want a scheduler                     |
| shards of weights              | no rank holds the model                                                            |
| `check_generation` of a module | e.g. experts with a capacity: a sequence would depend on its neighbours            |
| a layer without `inference_state` | it would be asked about tokens that it has forgotten                            |
| recorded or compiled: tp, `reads_device` | messages, and experts, whose dispatcher asks how many tokens each has got |

Prompt and continuation together may not exceed `max_sequence_length`: by default the model's `max_position_embeddings`,
beyond which learned positions do not exist and RoPE was never trained.

Megatron-LM: `megatron/core/inference/engines/static_engine.py`, `model_inference_wrappers/gpt`; CUDA graphs of
`contexts/dynamic_context.py`, one for each of several batch sizes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence

import torch

from minimegatron.comm.agree import gather_objects
from minimegatron.cuda_graphs import Recorded, Recorder
from minimegatron.errors import ConfigError, DataError, NumericsError, RankError
from minimegatron.inference.sampling import GREEDY, SamplingParams, sample, uniforms
from minimegatron.inference.static_cache import StaticCache
from minimegatron.models.contract import LanguageModel


def check_can_generate(model: LanguageModel) -> None:
    """Refuse a model that cannot generate here.

    Raises:
        ConfigError: its layout, one of its modules, a layer that does not say what it keeps, or its training mode.
    """
    mesh = model.mesh
    for axis in (mesh.cp, mesh.pp, mesh.ep):
        if axis.size > 1:
            raise ConfigError(
                f"generation with {axis.name} = {axis.size}: it runs over tp and dp",
                fix=f"build the model with {axis.name} = 1; weights are loaded into any layout",
            )
    for module in model.modules():
        if (check := getattr(module, "check_generation", None)) is not None:
            check()
    if mesh.sequence_parallel:
        raise ConfigError(
            "generation with sequence_parallel: one token cannot be cut over the ranks of tp",
            fix="build the model with sequence_parallel=False; weights are loaded into any layout",
        )
    model.inference_state()
    if any(hasattr(p, "placements") or p.numel() > p.untyped_storage().nbytes() for p in model.parameters()):
        raise ConfigError(
            "generation from shards of weights (ZeRO-3, FSDP2): no rank holds the model",
            fix="with ddp.whole_weights(): around the engine and its calls",
        )
    if model.training:
        raise ConfigError("generation in training mode: dropout would be part of the answer", fix="model.eval()")


def check_can_record(model: LanguageModel) -> None:
    """Refuse a model whose step cannot be recorded or compiled as a whole.

    Raises:
        ConfigError: it sends messages, or a module reads the device on the host (`reads_device`, in words).
    """
    if model.mesh.tp.size > 1:
        raise ConfigError(
            f"a recorded or compiled decode step with tp = {model.mesh.tp.size}: it can hold no messages",
            fix="neither recorder nor compiled, or tp = 1",
        )
    for module in model.modules():
        if (reads := getattr(module, "reads_device", None)) is not None:
            raise ConfigError(
                f"a recorded or compiled decode step with a {type(module).__name__}: {reads}",
                fix="neither recorder nor compiled",
            )


WARMUP_STEPS = 3


Tokens = tuple[torch.Tensor, torch.Tensor]


def compile_whole(run: Callable[[], Tokens]) -> Callable[[], Tokens]:
    """torch.compile, for the shapes that there are, in one piece or not at all."""
    return torch.compile(run, dynamic=False, fullgraph=True)


class DecodeStep:
    """The next token of every sequence in a cache.

    Args:
        model: see `check_can_generate`.
        cache: of these sequences.
        sampling: how tokens are drawn.
        recorder: records the step once, after `WARMUP_STEPS` real ones; None does without.
        compiled: torch.compile the step, when it is first called.

    Attributes:
        tokens, uniform: see the module docstring.

    Raises:
        ConfigError: the step cannot be recorded or compiled.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: StaticCache,
        sampling: SamplingParams,
        recorder: Recorder | None = None,
        compiled: bool = False,
    ) -> None:
        if recorder is not None or compiled:
            check_can_record(model)
        self.model = model
        self.cache = cache
        self.sampling = sampling
        self.tokens = torch.zeros_like(cache.positions)
        self.uniform = torch.zeros_like(cache.positions, dtype=torch.float64)
        self._compiled = compile_whole(self._run) if compiled else None
        self._recorded: Recorded[Tokens] | None = None if recorder is None else Recorded(WARMUP_STEPS, recorder)

    @torch.no_grad()
    def __call__(self, key_length: int | None = None) -> Tokens:
        """Draw one token for every sequence.

        Args:
            key_length: how many rows of the cache may be in use after this step, to read no others; default, and where
                the step is recorded or compiled always, all.

        Returns:
            The tokens [b] and their log-probabilities [b]; the next step overwrites both.
        """
        if self._recorded is not None:
            return self._recorded(self._compiled or self._run)
        return self._compiled() if self._compiled is not None else self._run(key_length)

    def _run(self, key_length: int | None = None) -> Tokens:
        logits = self.model.full_logits(self.tokens[:, None], inference_context=self.cache.decode(1, key_length))
        drawn, log_probs = sample(logits[:, 0], self.sampling, self.uniform)
        self.cache.advance(1)
        self.tokens.copy_(drawn)
        return self.tokens, log_probs


STEPS_BETWEEN_LOOKS = 16  # with a recording; without one the host is never ahead


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a prompt has become.

    Attributes:
        tokens: the new ids; the last of them is a stop id where there was one.
        log_probs: of each of them, at the temperature it was drawn with (`inference/sampling.py`).
        stopped: whether a stop id ended it; otherwise it has as many tokens as were asked for.
    """

    tokens: list[int]
    log_probs: list[float]
    stopped: bool


class StaticEngine:
    """Generates for batches of prompts, each batch from beginning to end.

    Args:
        model: whole on each rank of tp; in eval mode.
        max_sequence_length: of a prompt and its continuation together; default the model's `max_position_embeddings`.
        recorder: records one decode step for every number of sequences (`cuda_graphs.CudaRecorder`); None does without.
        compiled: torch.compile each of these steps, the first time it is needed.

    Raises:
        ConfigError: the model cannot generate here, its step can be neither recorded nor compiled, or it has fewer
            positions.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_sequence_length: int | None = None,
        recorder: Recorder | None = None,
        compiled: bool = False,
    ) -> None:
        check_can_generate(model)
        if recorder is not None or compiled:
            check_can_record(model)
        most = model.config.max_position_embeddings
        longest = most if max_sequence_length is None else max_sequence_length
        if longest > most and model.config.position_embedding_type == "learned_absolute":
            raise ConfigError(
                f"max_sequence_length is {longest}, and the model has {most} learned positions",
                fix=f"at most {most}",
            )
        self.model = model
        self.max_sequence_length = longest
        self.recorder = recorder
        self.compiled = compiled
        self._caches: dict[int, StaticCache] = {}
        self._steps: dict[tuple[int, SamplingParams], DecodeStep] = {}

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> list[Continuation]:
        """Continue every prompt.

        All ranks of tp call it with the same arguments; replicas of dp may have prompts of their own.

        Args:
            prompts: ids, at least one each; lengths may differ.
            max_new_tokens: for each prompt, at most.
            sampling: how tokens are drawn; default greedy.
            stop_ids: ids after which a sequence is over.
            seed: of the draws; sequence i of the batch has a stream of its own.

        Returns:
            A continuation for each prompt, in their order.

        Raises:
            ConfigError: nothing to generate, a stop id outside of the vocabulary, or a model in training mode.
            DataError: an empty prompt, an id outside the vocabulary, or a prompt that leaves too little room.
            RankError: ranks of tp were called with different arguments.
            NumericsError: a log-probability that is no number.
        """
        check_can_generate(self.model)
        prompts, stop_ids = [list(map(int, prompt)) for prompt in prompts], list(map(int, stop_ids))
        self._check_agreement(prompts, max_new_tokens, sampling, stop_ids, seed)  # first: what is refused, all refuse
        self._check(prompts, max_new_tokens, stop_ids)
        if not prompts:
            return []
        step = self._step(len(prompts), sampling)
        device = step.tokens.device
        draws = torch.stack([uniforms(seed, i, max_new_tokens) for i in range(len(prompts))], 1).to(device)  # [new, b]
        steps_done = [self._prefill(prompts, step, draws[0])]
        stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        stopped = torch.isin(step.tokens, stops)
        interval = 1 if self.recorder is None else STEPS_BETWEEN_LOOKS
        prompt_length = max(map(len, prompts))
        for i in range(1, max_new_tokens):
            if stop_ids and i % interval == 0 and bool(stopped.all()):
                break
            step.uniform.copy_(draws[i])
            drawn, log_prob = step(key_length=prompt_length + i)
            steps_done.append((drawn.clone(), log_prob.clone()))
            if stop_ids:
                stopped |= torch.isin(drawn, stops)
        tokens = torch.stack([drawn for drawn, _ in steps_done], 1).tolist()
        log_probs = torch.stack([each for _, each in steps_done], 1).tolist()
        return [_continuation(tokens[i], log_probs[i], set(stop_ids), i) for i in range(len(prompts))]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], step: DecodeStep, u: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the prompts; the first new token of each, [b], and its log-probability."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=step.tokens.device)
        n = max(map(len, prompts))
        ids = torch.tensor([[*prompt, *[0] * (n - len(prompt))] for prompt in prompts], device=lengths.device)
        context = step.cache.prefill(n, lengths)
        logits = self.model.full_logits(ids, inference_context=context, logits_at=lengths - 1)
        step.cache.advance(lengths)
        drawn, log_probs = sample(logits[:, 0], step.sampling, u)
        step.tokens.copy_(drawn)
        return drawn, log_probs

    def _step(self, batch: int, sampling: SamplingParams) -> DecodeStep:
        """The step for so many sequences, with its cache; both are kept, because a recording knows where they are."""
        if batch not in self._caches:
            self._caches[batch] = StaticCache(self.model, batch, self.max_sequence_length)
        key = batch, sampling
        if key not in self._steps:
            self._steps[key] = DecodeStep(self.model, self._caches[batch], sampling, self.recorder, self.compiled)
        return self._steps[key]

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> None:
        vocabulary, room = self.model.config.vocab_size, self.max_sequence_length
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}", fix="at least 1")
        for stop_id in stop_ids:
            if not 0 <= stop_id < vocabulary:
                raise ConfigError(f"stop id {stop_id} is not in a vocabulary of {vocabulary}", fix="leave it out")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise DataError("a prompt without a token", where=f"prompt {i}", fix="begin with the tokenizer's bos")
            foreign = next((place for place, token in enumerate(prompt) if not 0 <= token < vocabulary), None)
            if foreign is not None:
                raise DataError(
                    f"token id {prompt[foreign]} is not in a vocabulary of {vocabulary}",
                    where=f"prompt {i}, token {foreign}",
                    fix="the tokenizer that the model was trained with",
                )
            if len(prompt) + max_new_tokens > room:
                learned = self.model.config.position_embedding_type == "learned_absolute"
                raise DataError(
                    f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones are "
                    f"{len(prompt) + max_new_tokens}, and max_sequence_length is {room}",
                    where=f"prompt {i}",
                    fix="a shorter prompt, or fewer new tokens"
                    + ("" if learned else ", or a larger max_sequence_length"),
                )

    def _check_agreement(self, *arguments: object) -> None:
        """Ranks of tp compute parts of the same tokens; different arguments would mix two texts, or hang."""
        digests = gather_objects(
            hashlib.blake2b(repr(arguments).encode(), digest_size=8).hexdigest(), self.model.mesh.tp
        )
        if len(set(digests)) > 1:
            raise RankError(
                f"the ranks of tp were asked for different things: digests of their arguments are {', '.join(digests)}",
                fix="the same prompts, sampling parameters, stop ids and seed on every rank of tp",
            )


def _continuation(tokens: list[int], log_probs: list[float], stops: set[int], number: int) -> Continuation:
    """What is left of a sequence when all that follows its first stop id is gone."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    bad = next((i for i in range(end) if not math.isfinite(log_probs[i])), None)
    if bad is not None:
        raise NumericsError(
            f"the log-probability of a token is {log_probs[bad]}",
            where=f"prompt {number}, new token {bad}",
            fix="weights or activations are not finite: check the checkpoint, or a wider params_dtype",
        )
    return Continuation(tokens[:end], log_probs[:end], tokens[end - 1] in stops)


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    max_sequence_length: int | None = None,
) -> list[Continuation]:
    """`StaticEngine.generate`, once: with a cache just as long as these prompts need.

    Args:
        max_sequence_length: default the model's `max_position_embeddings`.
        model, prompts, max_new_tokens, sampling, stop_ids, seed: see `StaticEngine`.
    """
    engine = StaticEngine(model, max_sequence_length)
    needed = max(map(len, prompts), default=1) + max(max_new_tokens, 1)
    engine.max_sequence_length = min(engine.max_sequence_length, needed)
    return engine.generate(prompts, max_new_tokens, sampling, stop_ids=stop_ids, seed=seed)
