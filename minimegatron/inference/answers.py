"""Requests to all replicas, their answers on rank 0, and where a stop string ends an answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.inference.engine import Engine
    from minimegatron.inference.sequence import Output, Request
    from minimegatron.inference.sequence import Sequence as Answer


def compute(
    engine: Engine, requests: Sequence[Request], tokenizer: HuggingFaceTokenizer, stops: Sequence[str]
) -> list[list[Answer]]:
    """The answers to each request on rank 0, computed by all replicas; prints lines on stderr while it takes long."""
    from minimegatron.comm.agree import gather_objects, gather_to_first
    from minimegatron.inference.generate import complete

    world = engine.model.mesh.world
    leader = engine.runner.tell(world.rank)
    leaders = sorted(set(gather_objects(leader, world)))
    mine = range(leaders.index(leader), len(requests), len(leaders))
    total = sum(requests[i].n for i in mine)
    watch = watcher(engine, tokenizer, stops, total if world.rank == 0 else None)
    made = dict(zip(mine, complete(engine, [requests[i] for i in mine], watch), strict=True))
    for i, answers in made.items():
        for answer in answers:
            answer.request_id = str(i)
    gathered = gather_to_first(made, world) or [made]
    whole = {i: answers for each in gathered for i, answers in each.items()}
    return [whole[i] for i in sorted(whole)]


EVERY = 5.0  # seconds between two lines


def watcher(
    engine: Engine, tokenizer: HuggingFaceTokenizer, stops: Sequence[str], total: int | None
) -> Callable[[list[Output]], None]:
    """A function to be called after each step: it ends answers that have a stop string, and prints progress now and
    then.

    Args:
        total: answers of this replica; None prints nothing.
    """
    from minimegatron.inference.sequence import FinishReason

    began = said = time.monotonic()
    done = 0

    def watch(outputs: list[Output]) -> None:
        nonlocal said, done
        for output in outputs:
            over = output.reason is not None
            if not over and stops:
                answer = engine.sequences[output.request_id][output.index]
                if isinstance(ending(answer, tokenizer, stops)[1], str):
                    engine.finish(answer, FinishReason.STOP)
                    over = True
            done += over
        now, tokens = time.monotonic(), engine.drawn_tokens
        if total is not None and now - said >= EVERY:
            said = now
            drawn = f", {tokens} tokens, {tokens / (now - began):.0f} a second" if tokens else " are scored"
            print(f"{done} of {total} answers{drawn}", file=sys.stderr, flush=True)

    return watch


def ending(answer: Answer, tokenizer: HuggingFaceTokenizer, stops: Sequence[str]) -> tuple[str, str | int | None]:
    """(Text of an answer, what ended it: a stop string, before which the text is cut, a stop id, or None)."""
    size = tokenizer.vocab_size  # an id beyond it, which a model may have, has no text
    prompt, made = ([token for token in ids if token < size] for ids in (answer.continued, answer.answer))
    text = tokenizer.detokenize(prompt + made)[len(tokenizer.detokenize(prompt)) :]
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if found:
        place, stop = min(found)
        return text[:place], stop
    last = answer.answer[-1] if answer.answer else None
    return text, last if last in answer.request.stop_ids else None
