"""The engine: requests come in at any time, tokens come out, a step at a time.

    add_request ---> scheduler ---> Batch ---> runner, on every rank ---> Result ---> Output of each sequence
                        ^                                                   |
                        +----------- tokens, pages of who is over ----------+

Rank 0 has the scheduler; the other ranks `follow`. Everything that must not be wrong about sharing memory between
requests (`sequence`, `block_manager`, `scheduler`) is plain data that is tested without a model.

| refused                        | why                                                                                |
|--------------------------------|------------------------------------------------------------------------------------|
| cp                             | its ranks hold parts of every sequence: pages would be parts of tokens             |
| virtual stages                 | a step would cross each rank several times; build the model with one chunk a rank  |
| shards of weights              | no rank holds the model                                                            |
| `check_generation` of a module | e.g. experts with a capacity: a sequence would depend on its neighbours            |
| a layer without `inference_state` | it would be asked about tokens that it has forgotten                            |
| recorded or compiled: messages, `reads_device`, the method "mtp" | a recording holds none of them                   |
| speculative decoding: a layer that keeps something for a sequence | it cannot go back to before a rejected token    |

Yu et al. 2022 (Orca, OSDI); Kwon et al. 2023 (arXiv 2309.06180). Megatron-LM:
`megatron/core/inference/engines/dynamic_engine.py`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from minimegatron.comm.agree import gather_objects
from minimegatron.cuda_graphs import Recorder
from minimegatron.errors import ConfigError, DataError, MinimegatronError, NumericsError
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.grammar import Grammars
from minimegatron.inference.paged_cache import PagedCache, bytes_per
from minimegatron.inference.plan import Batch, Result, drafts_later, plan, plan_draft, scored_tokens
from minimegatron.inference.runner import Runner, check_can_record
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.scheduler import Chunk, Scheduler, Step
from minimegatron.inference.sequence import FinishReason, Output, Request, Sequence, check_request
from minimegatron.inference.speculative import DraftLength, NGrams, SpeculativeConfig, check_can_propose
from minimegatron.kernels.laid_out import lay_out


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine shares its memory and time.

    Args:
        max_model_len: longest prompt and answer together; default the model's `max_position_embeddings`.
        page_size: tokens of a page.
        num_pages: pages for tokens, beside the one for padding; default as many as `cache_bytes` hold, or without
            that as many as `max_num_seqs` sequences of `max_model_len` need.
        cache_bytes: of all pages of a rank; of pipeline stages, the one that keeps most decides for all.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step.
        enable_prefix_caching: pages are found again by their tokens.
        lay_out_weights: keep a second copy of each matrix, in the order in which a CPU reads it (`kernels/laid_out`);
            default where that is possible. It costs the memory of the weights once more.
        speculative: tokens are proposed and verified several a step; None for one a step.

    Raises:
        ConfigError: a number that is not above 0.
    """

    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    cache_bytes: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    lay_out_weights: bool = True
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"{field.name} is {value}", fix="a number above 0")


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a prompt has become.

    Attributes:
        tokens: the new ids; the last of them is a stop id where there was one.
        log_probs: of each of them, at the temperature it was drawn with (`inference/sampling.py`).
        stopped: whether a stop id ended it; otherwise it has as many tokens as were asked for.
        weight_version: of the weights that have made it, counted by `Engine.new_weights`.
    """

    tokens: list[int]
    log_probs: list[float]
    stopped: bool
    weight_version: int = 0


def check_can_generate(model: Any) -> None:
    """Refuse a model that cannot generate here.

    Raises:
        ConfigError: its layout, one of its modules, a layer that does not say what it keeps, or its training mode.
    """
    mesh = model.mesh
    if mesh.cp.size > 1:
        raise ConfigError(
            f"generation with cp = {mesh.cp.size}: its ranks hold parts of every sequence",
            fix="build the model with cp = 1; weights are loaded into any layout",
        )
    if len(getattr(model, "chunks", (model,))) > 1:
        raise ConfigError(
            f"generation with {len(model.chunks)} virtual stages on a rank",
            fix="build the model with one stage on each rank; weights are loaded into any layout",
        )
    for module in model.modules():
        if (check := getattr(module, "check_generation", None)) is not None:
            check()
    stage_of(model).inference_state()
    if any(hasattr(p, "placements") or p.numel() > p.untyped_storage().nbytes() for p in model.parameters()):
        raise ConfigError(
            "generation from shards of weights (ZeRO-3, FSDP2): no rank holds the model",
            fix="with ddp.whole_weights(): around the engine and its calls",
        )
    if model.training:
        raise ConfigError("generation in training mode: dropout would be part of the answer", fix="model.eval()")


def stage_of(model: Any) -> Any:
    """The stage of this rank: the model itself, or the one chunk of its `ModelChunks`."""
    return model.chunks[0] if hasattr(model, "chunks") else model


class Engine:
    """Generates for requests that come at any time.

    Args:
        model: in eval mode: a `LanguageModel`, or the `ModelChunks` of a pipeline rank.
        config: how it shares memory and time.
        recorder: records steps in which every sequence has one new token, for each number of sequences rounded up to
            a power of two (`cuda_graphs.CudaRecorder`).
        compiled: torch.compile each of these steps, the first time it is needed.
        draft: the model that proposes with speculative method "draft_model": in eval mode, in `model`'s layout.
        grammars: reads the grammars of requests; without it those that have one are refused.
        scheduler_cls: plans the steps; a subclass that overrides `schedule` (vLLM's name).

    Attributes:
        sequences: id -> the sequences of each request that is not over.
        steps, computed_tokens, drawn_tokens: counted since the beginning.
        drafts: how often a sequence had tokens proposed.
        proposed_tokens: of all of them.
        accepted_at: how often the first of a draft was accepted, the second, and so on.

    Raises:
        ConfigError: the model or the draft model cannot generate here, its steps can be neither recorded nor compiled,
            it has fewer positions than `max_model_len`, or they do not go together.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig = EngineConfig(),
        *,
        recorder: Recorder | None = None,
        compiled: bool = False,
        draft: Any = None,
        grammars: Grammars | None = None,
        scheduler_cls: type[Scheduler] = Scheduler,
    ) -> None:
        check_can_generate(model)
        if recorder is not None or compiled:
            check_can_record(model)
        most = model.config.max_position_embeddings
        self.max_model_len = most if config.max_model_len is None else config.max_model_len
        if self.max_model_len > most and model.config.position_embedding_type == "learned_absolute":
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, and the model has {most} learned positions",
                fix=f"at most {most}",
            )
        self.model, self.config = model, config
        check_can_propose(config.speculative, model, draft, self.max_model_len)
        self.heads = config.speculative is not None and config.speculative.method == "mtp"
        if self.heads and (recorder is not None or compiled):
            raise ConfigError(
                'speculative method "mtp" with recorded or compiled steps: these hold no passes of its depths',
                fix="neither recorder nor compiled",
            )
        self.draft, self.grammars = draft, grammars
        models = [model] if draft is None else [model, draft]
        if draft is not None:
            check_can_generate(draft)
        stage, states = stage_of(model), [stage_of(each).inference_state() for each in models]
        if self.heads:
            if not hasattr(stage, "prediction_state"):
                raise ConfigError(
                    f'speculative method "mtp" with a {type(stage).__name__}, which does not say what its depths keep',
                    fix="another method, or give the class `prediction_state` and `predicted` (models/contract)",
                )
            states[0] |= stage.prediction_state()
        weights = [next(iter(each.parameters())) for each in models]

        def bytes_of_all(per: str) -> int:
            return sum(bytes_per(state, per, weight.dtype) for state, weight in zip(states, weights, strict=True))

        # Rank 0 gives out pages and slots for all stages, which keep different things of a token.
        wanted = _num_pages(config, self.max_model_len, bytes_of_all("token"))
        num_pages = 1 + min(gather_objects(wanted, stage.mesh.pp))
        has_slots = any(gather_objects(bytes_of_all("sequence"), stage.mesh.pp))
        speculative = config.speculative
        if has_slots and speculative is not None:
            raise ConfigError(
                "speculative decoding with a layer that keeps something for a sequence: it cannot go back to before a "
                "rejected token",
                fix="speculative=None for this model",
            )
        cache, *others = (
            PagedCache(state, num_pages, config.page_size, config.max_num_seqs + 1, weight.dtype, weight.device)
            for state, weight in zip(states, weights, strict=True)
        )
        max_pages = -(-self.max_model_len // config.page_size)
        proposer = None if draft is None else Runner(stage_of(draft), others[0], max_pages)
        self.runner = Runner(stage, cache, max_pages, recorder, compiled, proposer, self.heads)
        # A state of a sequence holds all its tokens: what a page would skip is not in it.
        blocks = BlockManager(num_pages, config.page_size, config.enable_prefix_caching and not has_slots)
        self.scheduler = scheduler_cls(
            blocks,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            has_slots,
            speculative.num_speculative_tokens if speculative is not None else 0,
            self._places,
            newest_alone=self.heads,
        )
        self.laid_out_bytes = self._lay_out()
        self.sequences: dict[str, list[Sequence]] = {}
        self.steps = self.computed_tokens = self.drawn_tokens = self.drafts = self.proposed_tokens = 0
        self.accepted_at = [0] * (speculative.num_speculative_tokens if speculative is not None else 0)
        self.seconds = {"schedule": 0.0, "propose": 0.0, "run": 0.0, "update": 0.0}

    def add_request(self, request: Request, request_id: str) -> None:
        """A request arrives; its first tokens come out of a later `step`. Rank 0 alone is asked.

        Raises:
            ConfigError: nothing to generate, a number out of its range, a stop id outside of the vocabulary, or a
                grammar that cannot be read.
            DataError: a prompt without a token, an id outside the vocabulary, more tokens than there is room for, or
                an id of a request that is under way.
        """
        if request_id in self.sequences:
            raise DataError(f"there is a request {request_id!r} already", where=request_id, fix="another id")
        self.check(request, request_id)
        self.sequences[request_id] = self.scheduler.add(request, request_id)
        if request.grammar and self.grammars is not None:
            for sequence in self.sequences[request_id]:
                sequence.grammar = self.grammars.begin(request.grammar)

    def check(self, request: Request, request_id: str) -> None:
        """Refuse what could not be computed; raises as `add_request`."""
        check_request(request, request_id, self.model.config.vocab_size)
        self.scheduler.check(request, request_id)
        if request.grammar:
            if self.grammars is None:
                raise ConfigError(
                    "a request with a grammar, and an engine that reads none", fix="Engine(..., grammars=Grammars(...))"
                )
            self.grammars.check(request.grammar)

    def abort(self, request_id: str) -> list[Output]:
        """End a request before its time; its pages are others' at once. Nothing happens where it is over already."""
        self.sequences.pop(request_id, None)
        return [_output(sequence, 0) for sequence in self.scheduler.abort(request_id)]

    @property
    def accepted_tokens(self) -> int:
        """Proposed tokens that were accepted."""
        return sum(self.accepted_at)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.has_work

    def step(self) -> list[Output]:
        """Compute one step; rank 0 alone calls it, while the others `follow`.

        Returns:
            What was added to each sequence that has a new token or is over.
        """
        begun = time.perf_counter()
        step = self.scheduler.schedule()
        if not step.chunks:
            return []
        scheduled = time.perf_counter()
        drafted = self.draft is not None or self.heads
        if drafted:
            step = self._propose(step)
        proposed = time.perf_counter()
        batch = plan(step, drafted)
        planned = time.perf_counter()
        result = self._run(batch)
        ran = time.perf_counter()
        outputs = self._update(step, result)
        self.steps += 1
        self.computed_tokens += step.tokens
        done = time.perf_counter()
        for name, seconds in (
            ("schedule", scheduled - begun + planned - proposed),
            ("propose", proposed - scheduled),
            ("run", ran - planned),
            ("update", done - ran),
        ):
            self.seconds[name] += seconds
        return outputs

    def _run(self, batch: Batch) -> Result:
        if not self.runner.alone:
            self.runner.tell(batch)
        result = self.runner.run(batch)
        assert result is not None, "rank 0 has the result"
        return result

    def _places(self, sequence: Sequence, most: int) -> int:
        """How many tokens are proposed behind a sequence's newest, of at most so many; n-grams are looked up."""
        config = self.config.speculative
        assert config is not None, "nobody asked for proposals"
        if sequence.draft_length is None:
            sequence.draft_length = DraftLength(config.num_speculative_tokens)
        most = min(most, sequence.draft_length.count(len(sequence.tokens)))
        if config.method != "ngram" or not most:
            return most
        if sequence.lookup is None:
            sequence.lookup = NGrams(config.prompt_lookup_min, config.prompt_lookup_max)
        sequence.proposed = sequence.lookup.propose(sequence.tokens, most)
        if sequence.grammar is not None:
            del sequence.proposed[sequence.grammar.valid(sequence.proposed) :]
        return len(sequence.proposed)

    def _propose(self, step: Step) -> Step:
        """What each chunk has places for is drawn by the draft model, which computes what the step computes, or by the
        model's own depths, whose pages have been copied then.
        """
        for chunk in step.chunks:
            chunk.sequence.proposed = []
        passes = max(chunk.proposals for chunk in step.chunks)
        later = [drafts_later(step, chunk) for chunk in step.chunks]
        if self.draft is not None and not all(later):
            passes = max(passes, 1)
        for number in range(passes):
            drawn = self._run(plan_draft(step, number, self.heads)).tokens
            asked = [chunk.sequence for chunk in step.chunks if chunk.proposals > number]
            for sequence, token in zip(asked, drawn, strict=True):
                sequence.proposed.append(token)
        if self.draft is not None:
            for chunk, left_out in zip(step.chunks, later, strict=True):
                chunk.sequence.lag = chunk.sequence.lag + 1 if left_out else 0
        return dataclasses.replace(step, copies=()) if self.heads and passes else step

    def follow(self) -> None:
        """Compute what rank 0 plans, until it says that it is over (`stop`)."""
        while (batch := self.runner.tell(None)) is not None:
            if batch.new:
                self.runner.run(batch)

    def heartbeat(self) -> None:
        """The other ranks wait anew: rank 0 has nothing to compute, and every wait has a deadline."""
        if not self.runner.alone:
            self.runner.tell(Batch((), (), (), (), (), ()))

    def stop(self) -> None:
        """The other ranks return from `follow`."""
        if not self.runner.alone:
            self.runner.tell(None)

    def new_weights(self) -> int:
        """The model's weights have changed: whoever runs computes anew, and no page of before is found again.

        Every rank calls it. Who writes into the memory of weights, such as the flat buffers of data parallelism, leaves
        no mark on a parameter: copies of weights are made anew.

        Returns:
            The version of the weights, one more than before.
        """
        self._lay_out()
        self.scheduler.new_weights(self.scheduler.version + 1)
        return self.scheduler.version

    def _lay_out(self) -> int:
        models = [self.model] if self.draft is None else [self.model, self.draft]
        parameters = (parameter for model in models for parameter in model.parameters())
        return lay_out(parameters) if self.config.lay_out_weights else 0

    def generate(
        self,
        prompts: Items[Items[int]],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        stop_ids: Items[int] = (),
        seed: int = 0,
    ) -> list[Continuation]:
        """Continue every prompt.

        All ranks of tp, pp and ep call it with the same arguments; replicas of dp may have prompts of their own.

        Args:
            prompts: ids, at least one each; lengths may differ.
            max_new_tokens: for each prompt, at most.
            sampling: how tokens are drawn; default greedy.
            stop_ids: ids after which a sequence is over.
            seed: of the draws; prompt i has numbers of its own.

        Returns:
            A continuation for each prompt, in their order.

        Raises:
            ConfigError: nothing to generate, a stop id outside of the vocabulary, a model in training mode, or other
                requests under way, whose tokens nobody would get.
            DataError: an empty prompt, an id outside the vocabulary, or a prompt that leaves too little room.
            RankError: ranks were called with different arguments.
            NumericsError: logits that are no numbers.
        """
        requests = [
            Request(
                tuple(map(int, prompt)),
                max_new_tokens,
                sampling,
                frozenset(map(int, stop_ids)),
                seed=seed + (i << 32),
                log_probs=0,
            )
            for i, prompt in enumerate(prompts)
        ]
        return [
            Continuation(
                answer.answer,
                answer.log_probs,
                answer.reason is FinishReason.STOP,
                weight_version=answer.weight_version,
            )
            for (answer,) in self.complete(requests)
        ]

    def score(self, sequences: Items[tuple[Items[int], Items[int]]], *, temperature: float = 1.0) -> list[list[float]]:
        """The log-probabilities of given continuations, in one pass over each; nothing else may be under way.

        They are those of a teacher-forced pass of training. Pages of a prompt that are there already are read.

        Args:
            sequences: (prompt, continuation) of each, as ids; a prompt has at least one.
            temperature: T of softmax(l / T).

        Returns:
            A number for each token of each continuation.

        Raises:
            ConfigError, DataError, RankError, NumericsError: as `generate`.
        """
        sampling = SamplingParams(temperature)
        requests = [
            Request(
                (*map(int, prompt), *map(int, answer)),
                max_new_tokens=0,
                sampling=sampling,
                prompt_log_probs=0,
                prompt_log_probs_start=len(prompt),
            )
            for prompt, answer in sequences
        ]
        return [answer.prompt_log_probs for (answer,) in self.complete(requests)]

    def complete(
        self, requests: Items[Request], watch: Callable[[list[Output]], None] | None = None
    ) -> list[list[Sequence]]:
        """Compute requests to their end; nothing else may be under way.

        All ranks of tp, pp and ep call it with the same requests; replicas of dp may have their own.

        Args:
            requests: "prompt 0", "prompt 1" and so on.
            watch: called after each step, on rank 0 alone; it may `finish` sequences.

        Returns:
            The n sequences of each request, on every rank.

        Raises:
            ConfigError, DataError, RankError, NumericsError: as `generate`.
        """
        for model in (self.model, self.draft):
            if model is not None:
                check_can_generate(model)
        if self.has_work:
            raise ConfigError(
                f"generate while {len(self.sequences)} requests are under way", fix="`step` until `has_work` is false"
            )
        self.runner.check_agreement(requests)  # first: what is refused, all refuse
        for i, request in enumerate(requests):
            self.check(request, f"prompt {i}")
        if not self.runner.leads:
            self.follow()
            return _or_raise(self.runner.tell(None))
        answers: list[list[Sequence]] = []
        for i, request in enumerate(requests):
            self.add_request(request, f"prompt {i}")
            answers.append(self.sequences[f"prompt {i}"])
        try:
            while self.has_work:
                outputs = self.step()
                if watch is not None:
                    watch(outputs)
        except BaseException:  # such as an interrupt in a notebook: the next call finds nothing under way
            for i in range(len(requests)):
                self.abort(f"prompt {i}")
            raise
        self.stop()
        made: list[list[Sequence]] | MinimegatronError = answers
        for answer in (each for several in reversed(answers) for each in reversed(several)):
            if answer.failure:
                made = DataError(f"the grammar's parser gave up: {answer.failure}", where=answer.request_id)
            elif where := _not_a_number(answer):
                made = NumericsError(
                    "the log-probability of a token is nan",
                    where=f"{answer.request_id}, {where}",
                    fix="weights or activations are not finite: check the checkpoint, or a wider params_dtype",
                )
        return _or_raise(self.runner.tell(made))

    def _update(self, step: Step, result: Result) -> list[Output]:
        """Every sequence gets its token; those that are over give their pages back."""
        outputs, draw, score = [], 0, 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            for _ in range(scored_tokens(chunk)):
                value, top = result.scores[score]
                sequence.prompt_log_probs.append(value)
                sequence.prompt_top.append(top)
                score += 1
            if chunk.proposals:
                outputs.append(self._verified(chunk, result, draw))
                draw += chunk.proposals + 1
                continue
            forks = self.scheduler.computed(chunk)
            if not chunk.draws:
                continue
            if not sequence.request.max_new_tokens:
                sequence.reason, sequence.weight_version = FinishReason.LENGTH, self.scheduler.version
                outputs.append(_output(sequence, 0))
                self._over(sequence)
                continue
            for each in (sequence, *forks):
                self._drawn(each, result, draw)
                draw += 1
                outputs.append(_output(each, 1))
                if each.reason is not None:
                    self._over(each)
        return outputs

    def _verified(self, chunk: Chunk, result: Result, first: int) -> Output:
        """A sequence gets its proposed tokens up to the first that was rejected, or the end, and one more."""
        sequence, proposed, taken = chunk.sequence, chunk.sequence.proposed, 0
        while True:
            self._drawn(sequence, result, first + taken)
            taken += 1
            accepted = taken <= len(proposed) and sequence.tokens[-1] == proposed[taken - 1]
            if accepted:
                self.accepted_at[taken - 1] += 1
            if sequence.reason is not None or not accepted:
                break
        self.drafts += bool(proposed)
        self.proposed_tokens += len(proposed)
        sequence.proposed = []
        sequence.draft_length.told(taken - 1, len(sequence.tokens))
        if self.draft is not None and taken > len(proposed):
            sequence.lag = 1
        self.scheduler.computed(chunk, taken - 1)
        if sequence.reason is not None:
            self._over(sequence)
        return _output(sequence, taken)

    def _drawn(self, sequence: Sequence, result: Result, i: int) -> None:
        self.drawn_tokens += 1
        sequence.weight_version = self.scheduler.version
        sequence.append(result.tokens[i])
        sequence.log_probs.append(result.log_probs[i])
        sequence.top.append(result.top[i])
        if not result.finite[i]:
            sequence.reason, sequence.failure = FinishReason.ERROR, ""

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence whose caller has found its end, such as a stop string."""
        if sequence.reason is None:
            sequence.reason = reason
            self._over(sequence)

    def _over(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        sequence.grammar = None
        others = self.sequences.get(sequence.request_id, [])
        if all(each.reason is not None for each in others):
            self.sequences.pop(sequence.request_id, None)


def _not_a_number(sequence: Sequence) -> str:
    """Which token's logits were no numbers; "" for none."""
    if sequence.reason is FinishReason.ERROR:
        return f"new token {len(sequence.answer) - 1}"
    place = next((i for i, value in enumerate(sequence.prompt_log_probs) if math.isnan(value)), None)
    return "" if place is None else f"token {sequence.request.prompt_log_probs_start + place}"


def _or_raise(made: list[list[Sequence]] | MinimegatronError) -> list[list[Sequence]]:
    if isinstance(made, MinimegatronError):
        raise made
    return made


def _output(sequence: Sequence, count: int) -> Output:
    """What the last `count` tokens have added."""
    new = slice(len(sequence.log_probs) - count, None)
    return Output(
        sequence.request_id,
        sequence.index,
        tuple(sequence.answer[new]),
        tuple(sequence.log_probs[new]),
        tuple(sequence.top[new]),
        sequence.reason,
        sequence.weight_version,
        sequence.failure,
    )


def _num_pages(config: EngineConfig, max_model_len: int, bytes_per_token: int) -> int:
    """Pages for tokens.

    Raises:
        ConfigError: none.
    """
    one = -(-max_model_len // config.page_size)
    if config.num_pages is not None:
        return config.num_pages
    if config.cache_bytes is None or not bytes_per_token:
        return config.max_num_seqs * one
    pages = config.cache_bytes // (bytes_per_token * config.page_size)
    if pages < 1:
        raise ConfigError(
            f"cache_bytes {config.cache_bytes} hold no page: {config.page_size} tokens of {bytes_per_token} bytes",
            fix=f"at least {bytes_per_token * config.page_size * one} for a sequence of max_model_len {max_model_len}",
        )
    return pages
