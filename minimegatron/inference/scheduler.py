"""Which tokens of which sequences a step computes: plain data, no tensor, no model.

The problem in a sentence: prompts are long and come at any time, answers grow by a token a step, and a step should take
as many tokens as the machine likes, whoever they belong to.

    every step, with room for `max_num_batched_tokens`:
        1. sequences that run, oldest first: what they have not computed yet, one token where they generate
        2. sequences that wait, in order of arrival, while there is room, a seat (`max_num_seqs`) and pages

A prompt that is longer than the room left is computed in chunks, a chunk a step, together with the tokens of those that
generate: nobody's answer stalls while a prompt is read (chunked prefill; Agrawal et al. 2024, arXiv 2403.02310).

**Pages run out**, because answers grow. Then the sequence that arrived last gives its pages back, waits at its place in
the queue, and later computes prompt and answer so far anew (recomputation). It has no chunk in the step yet, since
older ones come first.

**Nobody waits for ever.** A sequence is never preempted for one that arrived later, one that cannot be admitted makes
those behind it wait, and a request that alone would not fit is refused. So the oldest advances in every step, and the
wait of any is bounded by the work in front of it.

**Proposed tokens** (`lookahead`, `inference/speculative.py`) stand behind the newest token of a sequence that
generates, and take pages and budget as other tokens do. A sequence gets places for all of them, or waits for a step
that has these: how many it gets must not depend on its neighbours, because a token is drawn in another way where there
is a proposal. `computed` counts final tokens only: what a rejected one has left in a page is written over, and others
find a page once all its tokens are final.

**n answers** to one prompt are one sequence until its prompt is computed; then the others are forks that share its
pages, and draw from the same logits. A page that is shared is copied before it is written (`Step.copies`), a slot when
the fork begins.

Megatron-LM: `megatron/core/inference/engines/dynamic_engine.py`, `contexts/dynamic_context.py`.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable

from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.sequence import FinishReason, Request, Sequence


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival, sequence.index


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that a step computes.

    Attributes:
        sequence: whose.
        start: the first of them.
        count: how many.
        draws: whether the last of them has the logits of a new token.
        proposals: how many proposed tokens are verified behind them.
    """

    sequence: Sequence
    start: int
    count: int
    draws: bool
    proposals: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """What is computed together.

    Attributes:
        chunks: in the order of the row.
        copies: (from, to) pages that are copied before anything is computed, as if all at once; each `to` occurs once.
        slot_copies: the same of slots.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    slot_copies: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """How many are computed."""
        return sum(chunk.count + chunk.proposals for chunk in self.chunks)


class Scheduler:
    """Sequences that wait and run, and the plan of the next step.

    Args:
        blocks: the pages.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step; at least one for each sequence that runs.
        max_model_len: longest prompt and answer together.
        has_slots: layers keep something for a sequence, in slots 1 to `max_num_seqs`; slot 0 is for padding.
        lookahead: proposed tokens of a sequence in a step, at most.
        propose: (sequence, most of them) -> how many there are; default as many as may be.
        newest_alone: proposals need what the model has made of the token before the newest, in an earlier step.

    Attributes:
        waiting, running: sequences, in order of arrival.
        preemptions: how often one lost its pages.

    Raises:
        ConfigError: fewer tokens a step than sequences, with their proposed ones.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        has_slots: bool = False,
        lookahead: int = 0,
        propose: Callable[[Sequence, int], int] = lambda _, most: most,
        newest_alone: bool = False,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {max_num_batched_tokens} for max_num_seqs {max_num_seqs} sequences",
                fix="at least one token for each sequence that runs, and at least one sequence",
            )
        if max_num_batched_tokens < max_num_seqs * (1 + lookahead):
            raise ConfigError(
                f"max_num_batched_tokens {max_num_batched_tokens} for max_num_seqs {max_num_seqs} sequences with "
                f"{lookahead} proposed tokens each",
                fix=f"at least {max_num_seqs * (1 + lookahead)}, fewer sequences, or a smaller num_speculative_tokens",
            )
        self.blocks, self.lookahead, self.propose, self.newest_alone = blocks, lookahead, propose, newest_alone
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = max_model_len
        self.version = 0
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0
        self._free_slots = list(range(max_num_seqs, 0, -1)) if has_slots else None
        self._forks: dict[str, list[Sequence]] = {}  # answers that wait for the prompt of the first
        self._slot_copies: dict[int, int] = {}  # to -> from: a slot that was given up and taken again has the last one

    def add(self, request: Request, request_id: str) -> list[Sequence]:
        """A request arrives.

        Returns:
            Its n sequences.

        Raises:
            DataError: it has no token, or could never be computed.
        """
        self.check(request, request_id)
        first, *others = (
            Sequence(request, request_id, index, self._arrivals, list(request.prompt)) for index in range(request.n)
        )
        self._arrivals += 1
        self.waiting.append(first)
        if others:
            self._forks[request_id] = others
        return [first, *others]

    def check(self, request: Request, request_id: str) -> None:
        """Refuse a request that could never be computed.

        Raises:
            DataError: as it says.
        """
        most, room = len(request.prompt) + request.max_new_tokens, self.blocks.capacity * self.blocks.page_size
        if not request.prompt:
            raise DataError("a prompt without a token", where=request_id, fix="begin with the tokenizer's bos")
        if most > self.max_model_len:
            raise DataError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {most}, and "
                f"max_model_len is {self.max_model_len}",
                where=request_id,
                fix="a shorter prompt, fewer new tokens, or (where no positions are learned) a larger max_model_len",
            )
        if most > room:
            raise DataError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {most}, and all "
                f"pages together hold {room}",
                where=request_id,
                fix="fewer tokens, or an engine with more pages",
            )
        if request.n > self.max_num_seqs:
            raise DataError(
                f"n is {request.n}, and max_num_seqs is {self.max_num_seqs}", where=request_id, fix="fewer answers"
            )

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Step:
        """The next step; no chunk where nothing waits or runs."""
        budget, preemptions = self.max_num_batched_tokens, self.preemptions
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        for sequence in self.running:  # it loses sequences at its end
            count, proposals = self._share(sequence, budget)
            if count > 0 and self._make_room(sequence, count + proposals, copies):
                chunks.append(self._chunk(sequence, count, proposals))
                budget -= count + proposals
        while self.waiting and budget > 0 and self.preemptions == preemptions:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            bisect.insort(self.running, self.waiting.popleft(), key=_arrival)
            count, proposals = self._share(sequence, budget)
            if count == 0:  # its newest token, and no room for what is proposed behind it
                break
            grown = self._grow(sequence, count + proposals, copies)
            assert grown, "admission has counted the pages"
            chunks.append(self._chunk(sequence, count, proposals))
            budget -= count + proposals
        slot_copies, self._slot_copies = self._slot_copies, {}
        return Step(tuple(chunks), tuple(copies), tuple((source, to) for to, source in slot_copies.items()))

    def _chunk(self, sequence: Sequence, count: int, proposals: int) -> Chunk:
        return Chunk(sequence, sequence.computed, count, sequence.computed + count == len(sequence.tokens), proposals)

    def _share(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        """How many tokens of a sequence a step computes, and how many proposed ones behind them."""
        count, most = min(sequence.waiting_tokens, budget), self._most_proposals(sequence)
        if not most or count < sequence.waiting_tokens:
            return count, 0
        places = self.propose(sequence, most)
        if places and (count + places > budget or (self.newest_alone and count > 1)):
            return count - 1, 0  # the newest waits for a step that has all places
        return count, places

    def _most_proposals(self, sequence: Sequence) -> int:
        """None before the first token of the answer, and so few that a token after all of them may still be drawn."""
        if len(sequence.tokens) == sequence.prompt_length:
            return 0
        return min(self.lookahead, sequence.most_tokens - len(sequence.tokens) - 1)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence that waits its seat: pages that hold its beginning already, and a slot."""
        seats = len(self._forks.get(sequence.request_id, ())) + 1 if sequence.index == 0 else 1
        taken = len(self.running) + sum(len(self._forks.get(s.request_id, ())) for s in self.running if s.index == 0)
        if taken + seats > self.max_num_seqs:
            return False
        blocks, root = self.blocks, (self.version, sequence.request.salt)
        known = sequence.findable if blocks.reuse else []
        found, parent = blocks.find(known, root)
        # Room for all its tokens and the next ones, though it takes them in chunks: else it would soon be preempted.
        whole = len(sequence.tokens) + max(1, self._most_proposals(sequence))
        more = blocks.pages_for(min(whole, sequence.most_tokens)) - len(found)
        if blocks.available - sum(blocks.users(page) == 0 for page in found) < more:
            return False
        for page in found:
            blocks.share(page)
        sequence.pages, sequence.looked_at, sequence.parent = found, len(found), parent
        sequence.computed = sequence.cached = len(found) * blocks.page_size
        blocks.hits += sequence.cached
        blocks.asked += len(known)
        if self._free_slots is not None:
            sequence.slot = self._free_slots.pop()
        return True

    def _make_room(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Pages for `count` more tokens, of those that arrived later if need be; False where it had to go itself."""
        while not self._grow(sequence, count, copies):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Pages for the next `count` tokens, a copy of a shared one among them; False where there are too few."""
        blocks, size = self.blocks, self.blocks.page_size
        more = blocks.pages_for(sequence.computed + count) - len(sequence.pages)  # below 0: left by rejected tokens
        at = sequence.computed // size
        shared = at < len(sequence.pages) and blocks.users(sequence.pages[at]) > 1
        if blocks.available < more + shared:
            return False
        if shared:
            page = blocks.take()
            copies.append((sequence.pages[at], page))
            blocks.release(sequence.pages[at])
            sequence.pages[at] = page
        sequence.pages += [blocks.take() for _ in range(more)]
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it waits at its place in the order of arrival and begins anew."""
        self._give_back(sequence)
        self.running.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        place = sum(_arrival(other) < _arrival(sequence) for other in self.waiting)
        self.waiting.insert(place, sequence)

    def computed(self, chunk: Chunk, accepted: int = 0) -> list[Sequence]:
        """A chunk is in pages now.

        Args:
            chunk: the chunk.
            accepted: how many of its proposed tokens the sequence has taken, already among its `tokens`.

        Returns:
            Forks that begin here: other answers to the same prompt, whose first token has the same logits.
        """
        sequence = chunk.sequence
        sequence.computed += chunk.count + accepted
        sequence.looked_at, sequence.parent = self.blocks.remember(
            sequence.tokens, sequence.pages, sequence.computed - sequence.lag, sequence.looked_at, sequence.parent
        )
        if not (chunk.draws and sequence.index == 0):
            return []
        forks = self._forks.pop(sequence.request_id, [])
        for fork in forks:
            fork.pages, fork.computed, fork.cached = list(sequence.pages), sequence.computed, sequence.computed
            fork.looked_at, fork.parent = sequence.looked_at, sequence.parent
            for page in fork.pages:
                self.blocks.share(page)
            if self._free_slots is not None:
                fork.slot = self._free_slots.pop()
                self._slot_copies[fork.slot] = sequence.slot
            bisect.insort(self.running, fork, key=_arrival)
        return forks

    def finish(self, sequence: Sequence) -> None:
        """A sequence is over, wherever it was; its pages are others' now."""
        assert sequence.reason is not None, "a sequence ends for a reason"
        if sequence in self.running:
            self._give_back(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request.

        Returns:
            Those that were not over.
        """
        found = [s for s in (*self.running, *self.waiting) if s.request_id == request_id]
        found += self._forks.pop(request_id, [])
        for sequence in found:
            sequence.reason = FinishReason.ABORT
            self.finish(sequence)
        return found

    def new_weights(self, version: int) -> None:
        """What pages hold belongs to other weights now: whoever runs computes anew, from another root."""
        self.version = version
        for sequence in list(self.running):
            self.preempt(sequence)
        for sequence in self.waiting:
            if not sequence.answer:  # its prompt is scored by one version
                sequence.prompt_log_probs.clear()
                sequence.prompt_top.clear()

    def _give_back(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):  # its last page is the first that is taken: its beginning may be found
            self.blocks.release(page)
        sequence.pages, sequence.computed, sequence.lag = [], 0, 0
        if self._free_slots is not None and sequence.slot:
            self._free_slots.append(sequence.slot)
        sequence.slot = 0
