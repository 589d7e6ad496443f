"""A learner's `schedule` in the place of the engine's own (lab 10): the engine asks it what each step computes.

    engine = Engine(model, config, scheduler_cls=planned_by(schedule))

The function sees rows of numbers and names, and returns names. Pages, tables, draws and the end of a sequence stay the
engine's. A plan that the pages or the step have no room for is refused, before anything is computed.

It knows no pages that are found again, no proposed tokens, and one answer to a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minimegatron.errors import ConfigError
from minimegatron.inference.scheduler import Chunk, Scheduler, Step
from minimegatron.inference.sequence import Sequence

Plan = Callable[..., dict[str, Any]]


def planned_by(schedule: Plan) -> type[Scheduler]:
    """The class of a scheduler whose steps this function plans; see the exercise `schedule` for what it gets."""

    class Planned(Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.blocks.reuse or self.lookahead:
                raise ConfigError(
                    "a schedule of one's own, with pages that are found again or proposed tokens: it knows neither",
                    fix="EngineConfig(enable_prefix_caching=False, speculative=None)",
                )

        def schedule(self) -> Step:
            rows = [[_row(sequence) for sequence in group] for group in (self.running, self.waiting)]
            blocks = self.blocks
            room = self.max_num_batched_tokens, self.max_num_seqs, blocks.available, blocks.page_size
            return self._carried_out(schedule(*rows, *room))

        def _carried_out(self, plan: dict[str, Any]) -> Step:
            named = {sequence.request_id: sequence for sequence in (*self.running, *self.waiting)}
            for name in plan["preempted"]:
                self.preempt(_known(named, name))
            chunks, copies = list[Chunk](), list[tuple[int, int]]()
            for name, count in plan["chunks"]:
                sequence = _known(named, name)
                if sequence in self.waiting:
                    if not self._admit(sequence):
                        raise ConfigError(f"`{name}` was admitted, and there is no seat or too few pages", where=name)
                    self.waiting.remove(sequence)
                    self.running.append(sequence)
                if not 1 <= count <= sequence.waiting_tokens or not self._grow(sequence, count, copies):
                    raise ConfigError(f"{count} tokens of `{name}`: it has not so many, or too few pages", where=name)
                chunks.append(self._chunk(sequence, count, 0))
            if sum(chunk.count for chunk in chunks) > self.max_num_batched_tokens:
                raise ConfigError(f"a step of more than {self.max_num_batched_tokens} tokens", where=str(plan))
            self.running.sort(key=lambda sequence: sequence.arrival)
            return Step(tuple(chunks), tuple(copies))

    return Planned


def _row(sequence: Sequence) -> dict[str, Any]:
    return {
        "name": sequence.request_id,
        "tokens": len(sequence.tokens),
        "computed": sequence.computed,
        "pages": len(sequence.pages),
    }


def _known(named: dict[str, Sequence], name: str) -> Sequence:
    if name not in named:
        raise ConfigError(f"`{name}` neither runs nor waits", where=", ".join(named))
    return named[name]
