"""A batch on one rank: from plain numbers to tokens.

The problem in a sentence: rank 0 schedules, and every rank that holds a part of the model must compute the same batch.

    rank 0        sends the Batch to all ranks of tp, pp and ep, in one message
    every rank    context -> forward pass of its stage, stage after stage
    last stage    wanted logits -> draws, log-probabilities -> rank 0

| axis | each rank                                                                                                    |
|------|--------------------------------------------------------------------------------------------------------------|
| tp   | has the pages of its own heads, so one page table serves all, and gets the same logits. With sequence        |
|      | parallelism the row is padded to a multiple of tp by a dummy sequence in page 0                              |
| pp   | has the pages of its own layers                                                                              |
| ep   | computes the same tokens                                                                                     |

**A recorded step** (`cuda_graphs.py`) is a decode step, from the embedding to the draw: every sequence has one new
token, the batch is padded to the next power of two, and all tensors stay at fixed addresses. At batch 1 a model of 1 B
parameters reads 2 GB a step, 0.42 ms for a GPU of 4.8 TB/s; in that time Python cannot launch the hundreds of kernels,
and a CUDA graph can. `compiled` lets torch.compile fuse the small kernels between two products, also on a CPU.

Megatron-LM: `megatron/core/inference/model_inference_wrappers/`, `text_generation_controllers/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.comm import collectives as c
from minimegatron.comm.agree import gather_objects, gather_to_first, scatter_from_first
from minimegatron.comm.p2p import PointToPoint
from minimegatron.cuda_graphs import Recorded, Recorder
from minimegatron.errors import ConfigError, RankError
from minimegatron.inference.paged_cache import PagedCache
from minimegatron.inference.plan import Batch, Result
from minimegatron.inference.results import plain_and_changed, result_of, shares_of
from minimegatron.inference.sampling import Rows, log_probabilities, sample
from minimegatron.layers.inference_context import InferenceContext
from minimegatron.layers.loras import Adapters
from minimegatron.parallel.pipeline.execution import PendingTensors, Tensors

WARMUP_STEPS = 3
Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, log-probabilities at T, largest logits, [r] each


def compile_whole(run: Callable[[], Drawn]) -> Callable[[], Drawn]:
    """torch.compile for static shapes, as one graph or not at all."""
    return torch.compile(run, dynamic=False, fullgraph=True)


class Runner:
    """Computes batches with this rank's part of the model and its pages.

    Args:
        stage: the model, or this rank's pipeline stage; in eval mode.
        cache: the pages of its layers.
        max_pages: most pages of one sequence.
        recorder: records decode steps; None: none are recorded.
        compiled: torch.compile decode steps.
        draft: the runner of a draft model; batches with `draft` set go to it.
        heads: the model's own depths (`models/mtp`) propose, and compute every token that the model computes.
        adapters: those beside the model's layers, which are told who has which; None without.
    """

    def __init__(
        self,
        stage: Any,
        cache: PagedCache,
        max_pages: int,
        recorder: Recorder | None = None,
        compiled: bool = False,
        draft: Runner | None = None,
        heads: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        self.stage, self.cache, self.mesh = stage, cache, stage.mesh
        self.max_pages, self.recorder, self.compiled = max_pages, recorder, compiled
        self.draft, self.heads, self.adapters = draft, heads, adapters
        self.shares: list[torch.Tensor | None] = []  # of a proposer: each pass's distributions; None if all greedy
        self.mail = PointToPoint(self.mesh) if self.mesh.pp.size > 1 else None
        self._recorded: dict[tuple[int, bool, bool], RecordedStep] = {}

    @property
    def leads(self) -> bool:
        """Whether this rank schedules: it is rank 0 of pp, ep and tp."""
        return all(axis.rank == 0 for axis in self._axes())

    @property
    def alone(self) -> bool:
        """Whether tp, pp and ep are 1."""
        return all(axis.size == 1 for axis in self._axes())

    def _axes(self) -> tuple[Any, ...]:
        return self.mesh.pp, self.mesh.ep, self.mesh.tp

    def tell(self, item: Any) -> Any:
        """Broadcast rank 0's item; returns it on every rank."""
        for axis in self._axes():
            item = scatter_from_first([item] * axis.size, axis)
        return item

    def check_agreement(self, *arguments: object) -> None:
        """Compare arguments over the ranks: different ones would mix two texts, or hang.

        Raises:
            RankError: they differ.
        """
        mine = hashlib.blake2b(repr(arguments).encode(), digest_size=8).hexdigest()
        for axis in self._axes():
            digests = gather_objects(mine, axis)
            if len(set(digests)) > 1:
                raise RankError(
                    f"the ranks of {axis.name} were asked for different things: digests of their arguments are "
                    f"{', '.join(digests)}",
                    fix=f"the same prompts, sampling parameters, stop ids and seed on every rank of {axis.name}",
                )

    def run(self, batch: Batch) -> Result | None:
        """Compute a batch; called on all ranks with the same one.

        Returns:
            The result, on rank 0 and on the last stage; None elsewhere.
        """
        if batch.draft is not None and self.draft is not None:
            return self.draft.run(batch)
        if self._records(batch):
            with torch.no_grad():  # not inference mode, in which `kernels` call CPU kernels that nobody can record
                self.cache.copy(batch.copies, batch.slot_copies)
                return self._play(batch)
        with torch.inference_mode():
            return self._run(batch)

    def _run(self, batch: Batch) -> Result | None:
        self.cache.copy(batch.copies, batch.slot_copies)
        result: Result | None = None
        if (logits := self._all_logits(batch)) is not None:
            if batch.draft is not None:
                del self.shares[batch.draft :]
                params = [draw.params for draw in batch.draws]
                sampled = any(not each.greedy for each in params)
                self.shares.append(shares_of(plain_and_changed(logits, batch.draws)[1], params) if sampled else None)
            result = result_of(logits, batch, (self.draft or self).shares)
        if self.mesh.pp.size > 1:
            found = gather_to_first(result, self.mesh.pp)
            result = found[-1] if found is not None else result
        return result

    def _all_logits(self, batch: Batch) -> torch.Tensor | None:
        """The wanted logits [k, V], on the last stage: of the model, or, in a proposer's pass, of one of its depths."""
        if not self.heads:
            return self._logits(batch)
        if batch.draft is not None:
            return self._predict(batch, batch.draft + 1) if self.stage.post_process else None
        logits = self._logits(batch)
        if self.stage.post_process:
            self._predict(batch, 1)
        return logits

    def _predict(self, batch: Batch, first: int) -> torch.Tensor | None:
        """Compute a batch by all depths from `first` on; the wanted logits [k, V] are those of depth `first`."""
        found = None
        for depth in range(first, self.stage.config.mtp_num_layers + 1):
            tokens: list[int] = []
            rows: list[tuple[int, int, tuple[int, ...]]] = []
            begin = 0
            for count, before, table in zip(batch.new, batch.kept, batch.tables, strict=True):
                skip = max(0, depth - before)  # depth d has no row for the first d tokens of a sequence
                if count > skip:
                    tokens += batch.tokens[begin + skip : begin + count]
                    rows.append((count - skip, before + skip, table))
                begin += count
            if self.mesh.sequence_parallel and (short := -len(tokens) % self.mesh.tp.size):
                tokens += [0] * short
                rows.append((short, depth, (0,) * -(-(depth + short) // self.cache.page_size)))
            if not rows:
                continue
            new, kept, tables = zip(*rows, strict=True)
            context = self.cache.context(new, kept, tables, (0,) * len(rows))
            rows_before = self.cache.context(new, [each - 1 for each in kept], tables, (0,) * len(rows)).rows
            row, at = torch.tensor([tokens], device=self.cache.device), None
            if depth == first and batch.draft is not None:
                at = torch.tensor(batch.wanted, device=self.cache.device)
            out = self.stage.predicted(depth, row, context, rows_before, at)
            if out is not None:
                found = c.gather_from_region(out, self.mesh.tp)[: len(batch.wanted), 0, : self.stage.config.vocab_size]
        return found

    def _logits(self, batch: Batch) -> torch.Tensor | None:
        """The wanted logits [k, V] of the model, on the last stage; None on the others."""
        tp, tokens = self.mesh.tp, list(batch.tokens)
        new, kept, tables, slots = list(batch.new), list(batch.kept), list(batch.tables), list(batch.slots)
        if self.mesh.sequence_parallel and (short := -len(tokens) % tp.size):
            tokens += [0] * short
            new.append(short)
            kept.append(0)
            tables.append((0,) * -(-short // self.cache.page_size))
            slots.append(0)
        if self.adapters is not None:
            self.adapters.choose(batch.adapters, new, self.cache.device)
        context = self.cache.context(new, kept, tables, slots)
        row = torch.tensor([tokens], device=self.cache.device)
        wanted = torch.tensor(batch.wanted or (0,), device=self.cache.device)
        seen = {name: tensor.to(self.cache.device) for name, tensor in (batch.seen or {}).items()}
        for name, value in (("position_ids", 0), ("picture_rows", -1)):
            if name in seen:  # of the dummy sequence, too
                seen[name] = F.pad(seen[name], (0, len(tokens) - len(batch.tokens)), value=value)
        if "position_ids" in seen:
            context = dataclasses.replace(context, position_ids=seen.pop("position_ids"))
        return self._forward(row, context, wanted, len(batch.wanted), **seen)

    def _forward(
        self, row: torch.Tensor, context: InferenceContext, wanted: torch.Tensor, count: int, **seen: torch.Tensor
    ) -> torch.Tensor | None:
        stage, inputs = self.stage, None
        if not stage.pre_process:
            takes, _ = stage.stage_specs(1, row.shape[1])
            assert self.mail is not None, "a stage without an embedding is one of several"
            inputs = PendingTensors(
                self.mail, self.mesh.pp.rank - 1, "hidden", takes
            ).wait()  # no deadline: the mail has one
        options: dict[str, Any] = seen | ({"logits_at": wanted} if stage.post_process else {})
        out = stage(row, inference_context=context, inputs=inputs, **options)
        if not stage.post_process:
            self._send(out)
            return None
        logits = c.gather_from_region(out, self.mesh.tp)
        return logits[:count, 0, : stage.config.vocab_size]

    def _send(self, out: Tensors) -> None:
        assert self.mail is not None, "a stage without an output layer is one of several"
        for name in sorted(out):
            self.mail.isend(out[name], self.mesh.pp.rank + 1, name, header=self.mesh.parallel.variable_seq_lengths)
        self.mail.wait_sends()

    def _records(self, batch: Batch) -> bool:
        plain = all(count == 1 for count in batch.new) and len(batch.draws) == len(batch.new) and not batch.scores
        plain = plain and batch.seen is None
        simple = all(not (d.params.penalises or d.banned or d.allowed or d.log_probs) for d in batch.draws)
        return (self.recorder is not None or self.compiled) and plain and simple and not self.heads

    def _play(self, batch: Batch) -> Result:
        params = [draw.params for draw in batch.draws]
        r = 1 << (len(params) - 1).bit_length()
        rows = Rows.of([*params, *params[-1:] * (r - len(params))], self.cache.device)
        key = r, rows.all_greedy, rows.filters
        if key not in self._recorded:
            self._recorded[key] = RecordedStep(self, rows)
        return self._recorded[key](batch, rows)


class RecordedStep:
    """A decode step of r sequences, recorded or compiled, with its input tensors at fixed addresses.

    Args:
        runner: computes it.
        rows: sampling parameters of the first call; those of later calls need the same operations (`Runner._play`).
    """

    def __init__(self, runner: Runner, rows: Rows) -> None:
        r, device = len(rows.temperature), runner.cache.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.runner, self.rows = runner, dataclasses.replace(rows, most=0)  # `candidates` ask the device
        self.tokens, self.u = zeros(1, r), zeros(r, dtype=torch.float64)
        self.context = InferenceContext(
            state=runner.cache.layers,
            position_ids=zeros(1, r),
            rows=zeros(r),
            starts=torch.arange(r + 1, dtype=torch.int32, device=device),
            lengths=zeros(r, dtype=torch.int32),
            page_table=zeros(r, runner.max_pages, dtype=torch.int32),
            slots=zeros(r),
            new=(1,) * r,
            totals=None,
        )
        self.wanted = torch.arange(r, device=device)
        self._run = compile_whole(self._step) if runner.compiled else self._step
        self._recorded = None if runner.recorder is None else Recorded[Drawn](WARMUP_STEPS, runner.recorder)

    def _step(self) -> Drawn:
        context = dataclasses.replace(self.context, _cache={})  # what is computed once a pass, is computed in this one
        logits = self.runner._forward(self.tokens, context, self.wanted, len(self.wanted))
        assert logits is not None, "a recorded step has all stages"
        tokens = sample(logits, self.rows, self.u)
        return tokens, log_probabilities(logits, tokens, self.rows.temperature), logits.amax(-1)

    def __call__(self, batch: Batch, rows: Rows) -> Result:
        """Compute a batch of at most r sequences; the other rows are padding in page 0."""
        k = len(batch.new)
        fresh = self.runner.cache.context(batch.new, batch.kept, batch.tables, batch.slots)
        mine = self.context
        mine.page_table.zero_()
        mine.page_table[:k, : fresh.page_table.shape[1]] = fresh.page_table
        for place, value in (
            (mine.position_ids[0], fresh.position_ids[0]),
            (mine.rows, fresh.rows),
            (mine.lengths, fresh.lengths),
            (mine.slots, fresh.slots),
            (self.tokens[0], torch.tensor(batch.tokens)),
            (self.u, torch.tensor([draw.u for draw in batch.draws], dtype=torch.float64)),
        ):
            place[:k] = value
            place[k:] = 1 if place is mine.lengths else 0
        for name in ("temperature", "top_k", "top_p", "min_p", "greedy"):
            getattr(self.rows, name).copy_(getattr(rows, name))
        run: Callable[[], Drawn] = self._run
        tokens, log_probs, best = run() if self._recorded is None else self._recorded(run)
        host = torch.stack([tokens.double(), log_probs.double(), best.double()]).tolist()
        return Result(
            [int(token) for token in host[0][:k]],
            host[1][:k],
            [()] * k,
            [math.isfinite(value) for value in host[2][:k]],
            [],
        )


def check_can_record(model: Any) -> None:
    """Refuse a model whose decode step cannot be recorded or compiled as a whole.

    Raises:
        ConfigError: tp, pp or ep is above 1, or a module reads the device on the host (its `reads_device` says why).
    """
    for axis in (model.mesh.tp, model.mesh.pp, model.mesh.ep):
        if axis.size > 1:
            raise ConfigError(
                f"a recorded or compiled decode step with {axis.name} = {axis.size}: it can hold no messages",
                fix=f"neither recorder nor compiled, or {axis.name} = 1",
            )
    for module in model.modules():
        if (reads := getattr(module, "reads_device", None)) is not None:
            raise ConfigError(
                f"a recorded or compiled decode step with a {type(module).__name__}: {reads}",
                fix="neither recorder nor compiled",
            )
