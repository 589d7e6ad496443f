"""Which tokens of which sequences a step computes: plain data, no tensor, no model.

The problem in a sentence: prompts are long and come at any time, answers grow by a token a step, and a step should take
as many tokens as the machine likes, whoever they belong to.

    every step, with room for `max_num_batched_tokens`:
        1. sequences that run, oldest first: what they have not computed yet, one token where they generate
        2. sequences that wait, in order of arrival, while there is room, a seat (`max_num_seqs`) and pages

A prompt that is longer than the room left is computed in chunks, a chunk a step, together with the tokens of those that
generate: nobody's answer stalls while a prompt is read (chunked prefill; Agrawal et al. 2024, arXiv 2403.02310).

**Pages run out**, because answers grow. Then the sequence that arrived last gives its pages back, waits at the head of
the queue, and later computes prompt and answer so far anew (recomputation). A sequence is never preempted for one that
arrived later, so the oldest always advances and none waits for ever; no request is admitted that alone would not fit.

**Order of arrival** also decides who is admitted: one that does not fit makes those behind it wait. So the wait of any
request is bounded by the work in front of it.

**Proposed tokens** (`lookahead`, `inference/speculative.py`) stand behind the newest token of a sequence that
generates, and take pages and budget as other tokens do. A sequence gets places for all of them, or waits for a step
that has these: how many it gets must not depend on its neighbours, because a token is drawn in another way where there
is a proposal. `computed` counts final tokens only: what a rejected one has left in a page is written over, and others
find a page once all its tokens are final.

**n answers** to one prompt are one sequence until its prompt is computed but for the last token; then the others are
forks that share its pages. A page that is shared is copied before it is written (`Step.copies`).

Megatron-LM: `megatron/core/inference/engines/dynamic_engine.py`, `contexts/dynamic_context.py`.
"""

from __future__ import annotations

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
        copies: (from, to) pages that are copied before anything is computed.
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
        self.blocks, self.lookahead, self.propose = blocks, lookahead, propose
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len = max_model_len
        self.version = 0
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0
        self._free_slots = list(range(max_num_seqs, 0, -1)) if has_slots else None
        self._forks: dict[str, list[Sequence]] = {}  # answers that wait for the prompt of the first
        self._slot_copies: list[tuple[int, int]] = []

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
        copies: dict[int, int] = {}  # to -> from: a page that is taken twice has what came last
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one
                continue
            count, proposals = self._share(sequence, budget)
            if count > 0 and self._make_room(sequence, count + proposals, copies):
                chunks.append(self._chunk(sequence, count, proposals))
                budget -= count + proposals
        while self.waiting and budget > 0 and self.preemptions == preemptions:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.running.append(self.waiting.popleft())
            count, proposals = self._share(sequence, budget)
            if count == 0:  # its newest token, and no room for what is proposed behind it
                break
            grown = self._grow(sequence, count + proposals, copies)
            assert grown, "admission has counted the pages"
            chunks.append(self._chunk(sequence, count, proposals))
            budget -= count + proposals
        self.running.sort(key=_arrival)
        slot_copies, self._slot_copies = tuple(self._slot_copies), []
        return Step(tuple(chunks), tuple((source, to) for to, source in copies.items()), slot_copies)

    def _chunk(self, sequence: Sequence, count: int, proposals: int) -> Chunk:
        return Chunk(sequence, sequence.computed, count, sequence.computed + count == len(sequence.tokens), proposals)

    def _share(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        """How many tokens of a sequence a step computes, and how many proposed ones behind them."""
        count, most = min(sequence.waiting_tokens, budget), self._most_proposals(sequence)
        if not most or count < sequence.waiting_tokens:
            return count, 0
        if count + most > budget:
            return count - 1, 0  # the newest waits for a step that has all places
        return count, self.propose(sequence, most)

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
        blocks = self.blocks
        root = blocks.root(self.version, sequence.request.salt)
        wants_logits = sequence.request.prompt_log_probs is not None
        found = [] if wants_logits else blocks.find(sequence.tokens, root)
        first = min(sequence.waiting_tokens - len(found) * blocks.page_size, self.max_num_batched_tokens)
        proposals = self._most_proposals(sequence)
        needed = blocks.pages_for(len(found) * blocks.page_size + first + proposals) - len(found)
        # Room for the whole of it, so that it is not preempted before it has drawn a token.
        whole = blocks.pages_for(len(sequence.tokens) + 1) - len(found)
        if blocks.available < min(max(needed, whole), blocks.capacity - len(found)):
            for page in found:
                blocks.release(page)
            return False
        sequence.pages = found
        sequence.computed = sequence.cached = len(found) * blocks.page_size
        sequence.looked_at, sequence.serial = len(found), blocks.serial_of(found[-1]) if found else root
        if self._free_slots is not None:
            sequence.slot = self._free_slots.pop()
        return True

    def _make_room(self, sequence: Sequence, count: int, copies: dict[int, int]) -> bool:
        """Pages for `count` more tokens, of those that arrived later if need be; False where it had to go itself."""
        while not self._grow(sequence, count, copies):
            victim = max(self.running, key=_arrival)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int, copies: dict[int, int]) -> bool:
        """Pages for the next `count` tokens, a copy of a shared one among them; False where there are too few."""
        blocks, size = self.blocks, self.blocks.page_size
        more = blocks.pages_for(sequence.computed + count) - len(sequence.pages)  # below 0: rejected tokens have left some
        at = sequence.computed // size
        shared = at < len(sequence.pages) and blocks.users(sequence.pages[at]) > 1
        if blocks.available < more + shared:
            return False
        if shared:
            page = blocks.take()
            copies[page] = sequence.pages[at]
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
        sequence.looked_at, sequence.serial = self.blocks.remember(
            sequence.tokens, sequence.pages, sequence.computed - sequence.lag, sequence.looked_at, sequence.serial
        )
        if not (chunk.draws and sequence.index == 0):
            return []
        forks = self._forks.pop(sequence.request_id, [])
        for fork in forks:
            fork.pages, fork.computed, fork.cached = list(sequence.pages), sequence.computed, sequence.computed
            fork.looked_at, fork.serial = sequence.looked_at, sequence.serial
            for page in fork.pages:
                self.blocks.share(page)
            if self._free_slots is not None:
                fork.slot = self._free_slots.pop()
                self._slot_copies.append((sequence.slot, fork.slot))
            self.running.append(fork)
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
        """What pages hold belongs to other weights now: whoever runs computes anew, and nothing old is found."""
        self.version = version
        for sequence in list(self.running):
            self.preempt(sequence)
        self.blocks.reset()

    def _give_back(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):  # its last page is the first that is taken: its beginning may be found
            self.blocks.release(page)
        sequence.pages, sequence.computed, sequence.looked_at, sequence.serial, sequence.lag = [], 0, 0, 0, 0
        if self._free_slots is not None and sequence.slot:
            self._free_slots.append(sequence.slot)
        sequence.slot = 0
