"""The engine: requests come in at any time, tokens come out, a step at a time (continuous batching).

    add_request ---> scheduler ---> Batch ---> runner, on every rank ---> Result ---> Output of each sequence
                        ^                                                   |
                        +------ new tokens, pages of finished sequences ----+

| call                                       | who calls it                                                   |
|--------------------------------------------|----------------------------------------------------------------|
| `add_request`, `step`, `abort`, `stop`     | rank 0, which schedules; the other ranks are in `follow`       |
| `new_weights`                              | all ranks, between two steps                                   |

Who has prompts and wants their answers calls `inference/generate`, which calls these.

| refused                                                           | why                                             |
|-------------------------------------------------------------------|-------------------------------------------------|
| cp > 1                                                            | each rank would cache a part of every sequence  |
| virtual stages                                                    | a step would pass each rank several times       |
| sharded weights (ZeRO-3, FSDP2)                                   | no rank holds the weights of its layers         |
| a module whose `check_generation` raises                          | e.g. experts with a capacity: whether a token   |
|                                                                   | is dropped depends on the rest of the batch     |
| a layer without `inference_state`                                 | it caches nothing of earlier tokens             |
| recorded or compiled steps with messages, `reads_device` (experts,| a CUDA graph can hold none of them              |
| adapters of requests) or "mtp"                                    |                                                 |
| speculative decoding with a layer that has a recurrent state      | the state cannot be rolled back to before a     |
|                                                                   | rejected token                                  |

Yu et al. 2022 (Orca, OSDI); Kwon et al. 2023 (arXiv 2309.06180). Megatron-LM:
`megatron/core/inference/engines/dynamic_engine.py`.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from minimegatron.comm.agree import gather_objects
from minimegatron.cuda_graphs import Recorder
from minimegatron.data.pictures import SeenPrompt
from minimegatron.errors import ConfigError, DataError, did_you_mean
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.grammar import Grammars
from minimegatron.inference.paged_cache import PagedCache, bytes_per
from minimegatron.inference.plan import Batch, Result, drafts_later, plan, plan_draft, scored_tokens
from minimegatron.inference.runner import Runner, check_can_record
from minimegatron.inference.scheduler import Chunk, Scheduler, Step
from minimegatron.inference.sequence import FinishReason, Output, Request, Sequence, check_request
from minimegatron.inference.speculative import DraftLength, NGrams, SpeculativeConfig, check_can_propose
from minimegatron.kernels.laid_out import lay_out
from minimegatron.layers.loras import Adapters


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine divides its memory and its steps.

    Args:
        max_model_len: most tokens of a prompt and its answer together; default the model's `max_position_embeddings`,
            and no more than a step has if prompts are computed whole.
        page_size: tokens of a page.
        num_pages: pages for tokens, beside page 0 for padding. Default: what `cache_bytes` holds; without it, what
            `max_num_seqs` sequences of `max_model_len` need.
        cache_bytes: bytes of all pages of a rank. The pipeline stage that keeps most bytes a token sets the number of
            pages of all.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of a step.
        enable_prefix_caching: sequences with equal beginnings share the pages of these.
        lay_out_weights: prepack the weights for the CPU (`kernels/laid_out`), where possible. Costs their memory once
            more.
        speculative: propose and verify several tokens a step; None: one token a step.

    Raises:
        ConfigError: a number below 1.
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


def check_can_generate(model: Any) -> None:
    """Refuse a model that cannot generate; see the table above.

    Raises:
        ConfigError: for its layout, a module, a layer without `inference_state`, sharded weights, or training mode.
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


def batched_tokens(model: Any, count: int, longest: int) -> int:
    """A `max_num_batched_tokens` for `count` sequences of at most `longest` tokens: the default, or what they need."""
    whole = getattr(stage_of(model), "whole_prompts", False)
    return max(EngineConfig.max_num_batched_tokens, count, longest if whole else 0)


class Engine:
    """Generates for requests that arrive at any time.

    Args:
        model: a `LanguageModel`, or the `ModelChunks` of a pipeline rank; in eval mode.
        config: sizes of memory and steps.
        recorder: records decode steps (one new token a sequence) as CUDA graphs, one for each number of sequences
            rounded up to a power of two (`cuda_graphs.CudaRecorder`).
        compiled: torch.compile these steps, each when it is first needed.
        draft: the draft model of the speculative method "draft_model"; in eval mode, in the layout of `model`.
        grammars: compiles the grammars of requests; without it a request with a grammar is refused.
        adapters: those beside the model's layers (`inference/adapters`), of which a request may name one.
        scheduler_cls: the scheduler, or a subclass that overrides `schedule` (vLLM's name).

    Attributes:
        sequences: request id -> its sequences, while one of them is not finished.
        steps, computed_tokens, drawn_tokens: totals since the engine was made.
        drafts: how often tokens were proposed to a sequence; proposed_tokens: how many in all.
        accepted_at: how often the first token of a draft was accepted, the second, and so on.
        seconds: spent in each part of a step: schedule, propose, run, update.

    Raises:
        ConfigError: the model or the draft model cannot generate, or cannot be recorded or compiled as asked; learned
            positions do not reach `max_model_len`, or a step does not where prompts are computed whole; the draft model
            does not fit the model.
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
        adapters: Adapters | None = None,
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
        stage, recorded = stage_of(model), recorder is not None or compiled
        whole, budget = getattr(stage, "whole_prompts", False), config.max_num_batched_tokens
        if whole and self.max_model_len > budget:
            if config.max_model_len is not None:
                raise ConfigError(
                    f"max_model_len is {self.max_model_len}, and a step has {budget} tokens (max_num_batched_tokens), "
                    f"in which {type(stage).__name__} computes a whole prompt",
                    fix=f"max_num_batched_tokens={self.max_model_len}, or a max_model_len of at most {budget}",
                )
            self.max_model_len = budget
        check_can_propose(config.speculative, stage, draft, self.max_model_len, recorded)
        self.heads = config.speculative is not None and config.speculative.method == "mtp"
        self.draft, self.grammars, self.adapters = draft, grammars, adapters
        models = [model] if draft is None else [model, draft]
        if draft is not None:
            check_can_generate(draft)
        states = [stage_of(each).inference_state() for each in models]
        if self.heads:
            states[0] |= stage.prediction_state()
        weights = [next(iter(each.parameters())) for each in models]

        def bytes_of_all(per: str) -> int:
            return sum(bytes_per(state, per, weight.dtype) for state, weight in zip(states, weights, strict=True))

        # Rank 0 assigns pages and slots for all stages, and stages keep different numbers of bytes a token.
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
        self.runner = Runner(stage, cache, max_pages, recorder, compiled, proposer, self.heads, adapters)
        # With a recurrent state no prefix is reused: the state after the prefix is in no page.
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
            whole_prompts=whole,
        )
        self.laid_out_bytes = self._lay_out()
        self.sequences: dict[str, list[Sequence]] = {}
        self.steps = self.computed_tokens = self.drawn_tokens = self.drafts = self.proposed_tokens = 0
        self.accepted_at = [0] * (speculative.num_speculative_tokens if speculative is not None else 0)
        self.seconds = {"schedule": 0.0, "propose": 0.0, "run": 0.0, "update": 0.0}

    def add_request(self, request: Request, request_id: str) -> None:
        """Queue a request; a later `step` returns its first tokens. Called on rank 0 alone.

        Raises:
            ConfigError: nothing to generate, a number out of range, a stop id outside the vocabulary, a grammar that
                cannot be compiled, or an adapter that is not there.
            DataError: an empty prompt, an id outside the vocabulary, more tokens than `max_model_len` or the pages
                hold, or the id of a request under way.
        """
        if request_id in self.sequences:
            raise DataError(f"there is a request {request_id!r} already", where=request_id, fix="another id")
        self.check(request, request_id)
        self.sequences[request_id] = self.scheduler.add(request, request_id)
        source = self._source_of(request, request_id)
        for sequence in self.sequences[request_id]:
            sequence.source = source
        if request.pictures:
            seen = SeenPrompt(request.prompt, request.pictures, self.model.config)
            for sequence in self.sequences[request_id]:
                sequence.seen = seen
        if request.grammar and self.grammars is not None:
            for sequence in self.sequences[request_id]:
                sequence.grammar = self.grammars.begin(request.grammar)

    def check(self, request: Request, request_id: str) -> None:
        """Refuse a request that could never be computed; raises as `add_request`."""
        check_request(request, request_id, self.model.config.vocab_size)
        self._source_of(request, request_id)
        self.scheduler.check(request, request_id)
        names = () if self.adapters is None else self.adapters.names
        if request.adapter and request.adapter not in names:
            raise ConfigError(
                f"a request for the adapter {request.adapter!r}, and the engine has {', '.join(names) or 'none'}",
                where=request_id,
                fix=did_you_mean(request.adapter, names) or "load_adapters(model, ...), and Engine(..., adapters=...)",
            )
        if request.pictures and (not self.model.config.sees or self.draft is not None):
            what = "a model that has no vision encoder" if self.draft is None else "a draft model, which has none"
            raise ConfigError(
                f"a request with {len(request.pictures)} pictures, and {what}",
                where=request_id,
                fix="a model that sees, and no draft model: speculative method ngram",
            )
        if self.model.config.sees:
            SeenPrompt(request.prompt, request.pictures, self.model.config)  # the prompt has room for its pictures
        if request.grammar:
            if self.grammars is None:
                raise ConfigError(
                    "a request with a grammar, and an engine that reads none", fix="Engine(..., grammars=Grammars(...))"
                )
            self.grammars.check(request.grammar)

    def _source_of(self, request: Request, request_id: str) -> int:
        """How many tokens of a prompt an encoder of the model reads; raises as the stage's `source_of`."""
        asked = getattr(stage_of(self.model), "source_of", None)
        return 0 if asked is None else int(asked(request.prompt, request_id))

    def abort(self, request_id: str) -> list[Output]:
        """End a request early and free its pages at once; without effect on one that is finished."""
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
        """Compute one step. Called on rank 0 alone, while the other ranks `follow`.

        Returns:
            An output for each sequence that has new tokens or is finished.
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
        batch = plan(step, self.model.config, drafted)
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
        """How many tokens to propose to a sequence, at most `most`; with "ngram" they are looked up here."""
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
        """Draw the proposed tokens of each chunk, by the draft model or the model's own depths (MTP).

        The draft model computes the tokens of the step as well. The depths share the model's pages, so their first pass
        makes the step's page copies, and the step returned makes none.
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

    def _update(self, step: Step, result: Result) -> list[Output]:
        """Append the new tokens to their sequences, and free the pages of those that are finished."""
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
        """Append the accepted proposals of a chunk and the one token after them, or up to the end of the answer."""
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
        """End a sequence for a reason that the engine does not see, such as a stop string."""
        if sequence.reason is None:
            sequence.reason = reason
            self._over(sequence)

    def _over(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        sequence.grammar = None
        others = self.sequences.get(sequence.request_id, [])
        if all(each.reason is not None for each in others):
            self.sequences.pop(sequence.request_id, None)

    def follow(self) -> None:
        """Compute the batches that rank 0 sends, until it calls `stop`. Called on all other ranks."""
        while (batch := self.runner.tell(None)) is not None:
            if batch.new:
                self.runner.run(batch)

    def heartbeat(self) -> None:
        """Send the ranks in `follow` an empty batch: their wait for rank 0 has a deadline, which begins anew."""
        if not self.runner.alone:
            self.runner.tell(Batch((), (), (), (), (), ()))

    def stop(self) -> None:
        """Let the other ranks return from `follow`."""
        if not self.runner.alone:
            self.runner.tell(None)

    def new_weights(self) -> int:
        """Tell the engine that its model's weights have changed. Called on every rank.

        Running sequences are computed again from their beginning, no older page is reused, and prepacked copies of
        weights are made anew: a write into a flat buffer under a parameter does not show in the parameter's version.

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


def _output(sequence: Sequence, count: int) -> Output:
    """The output with the last `count` tokens of a sequence."""
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
    """Pages for tokens, without page 0.

    Raises:
        ConfigError: `cache_bytes` holds not even one.
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
