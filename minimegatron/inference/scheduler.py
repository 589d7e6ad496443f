"""The scheduler: which tokens of which sequences a step computes. Plain data, no tensor, no model.

The problem in a sentence: prompts are long and arrive at any time, answers grow by a token a step, and each step should
have as many tokens as the machine computes efficiently, of whichever sequences.

    each step has a budget of `max_num_batched_tokens`, for:
        1. running sequences, oldest first: their tokens that are not computed yet, one where they decode
        2. waiting sequences, in order of arrival, while there are budget, a seat (`max_num_seqs`) and pages

**Chunked prefill.** A prompt longer than the budget left is computed in chunks, one a step, beside the tokens of
decoding sequences, so no answer stalls while a prompt is computed (Agrawal et al. 2024, arXiv 2403.02310).

**Preemption.** Answers grow, so pages run out. Then the sequence that arrived last frees its pages, returns to its
place in the queue, and later computes its prompt and answer so far again (recomputation). It has no chunk in the
current step yet, since older sequences come first.

**No starvation.** No sequence is preempted for a later one, none overtakes one that cannot be admitted, and a request
that would not fit alone is refused. So the oldest sequence advances in every step.

**Proposed tokens** (`lookahead`, `inference/speculative.py`) follow the newest token of a decoding sequence, and take
pages and budget as other tokens do. If the budget has no room for all of them, the sequence waits a step: their number
must not depend on the rest of the batch, since a place with a proposal draws its token differently. `computed` counts
accepted tokens only: the rows of rejected ones are overwritten, and a page enters the prefix cache when all its tokens
are accepted.

**n answers** to a prompt are one sequence until the prompt is computed. Then the others fork from it: they share its
pages and draw from the same logits. A shared page is copied before it is written (`Step.copies`), a slot at the fork.

Megatron-LM: `megatron/core/inference/engines/dynamic_engine.py`,
`megatron/core/inference/contexts/dynamic_context.py`.
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
        sequence: the sequence.
        start: position of the first token.
        count: number of tokens.
        draws: whether a new token is drawn after the last one: all tokens are computed then.
        proposals: number of proposed tokens that are verified after them.
    """

    sequence: Sequence
    start: int
    count: int
    draws: bool
    proposals: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """What one forward pass computes.

    Attributes:
        chunks: in the order of the row.
        copies: (from, to) pages, copied before the forward pass; see `PagedCache.copy`.
        slot_copies: the same for slots.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    slot_copies: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens computed, proposed ones included."""
        return sum(chunk.count + chunk.proposals for chunk in self.chunks)


class Scheduler:
    """The queues of waiting and running sequences, and the plan of the next step.

    Args:
        blocks: the page allocator.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of a step; at least one for each running sequence.
        max_model_len: most tokens of a prompt and its answer together.
        has_slots: layers keep a state for each sequence, in slots 1 to `max_num_seqs`; slot 0 is for padding.
        lookahead: most proposed tokens of a sequence in a step.
        propose: (sequence, most) -> number of proposed tokens; default: `most`.
        whole_prompts: the tokens that a sequence waits for are computed in one step, or wait; a step then has room for
            `max_model_len`.
        newest_alone: a sequence gets proposals only in a step that computes its newest token alone, because the
            proposer (MTP) needs the hidden state of the token before it.

    Attributes:
        waiting, running: sequences, in order of arrival.
        version: of the weights, see `new_weights`.
        preemptions: total number.

    Raises:
        ConfigError: `max_num_batched_tokens` is too small for `max_num_seqs` sequences with their proposed tokens.
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
        whole_prompts: bool = False,
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
        self.max_model_len, self.whole_prompts = max_model_len, whole_prompts
        self.version = 0
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._arrivals = 0
        self._free_slots = list(range(max_num_seqs, 0, -1)) if has_slots else None
        self._forks: dict[str, list[Sequence]] = {}  # answers 1 .. n - 1 of requests whose prompt is not computed yet
        self._slot_copies: dict[int, int] = {}  # to -> from; for a slot that was freed and taken again, the last one

    def add(self, request: Request, request_id: str) -> list[Sequence]:
        """Queue a request.

        Returns:
            Its n sequences.

        Raises:
            DataError: as `check`.
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
            DataError: an empty prompt, more tokens than `max_model_len` or all pages hold, or n above `max_num_seqs`.
        """
        most, room = len(request.prompt) + request.max_new_tokens, self.blocks.capacity * self.blocks.page_size
        if not request.prompt:
            raise DataError("a prompt without a token", where=request_id, fix="begin with the tokenizer's bos")
        if most > self.max_model_len:
            raise DataError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {most}, and "
                f"max_model_len is {self.max_model_len}",
                where=request_id,
                fix="a shorter prompt, fewer new tokens, or (where no positions are learned) a larger max_model_len"
                + ", and max_num_batched_tokens: prompts are computed whole" * self.whole_prompts,
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
        """Whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Step:
        """Plan the next step; it has no chunks if no sequence waits or runs."""
        budget, preemptions = self.max_num_batched_tokens, self.preemptions
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        for sequence in self.running:  # preemption removes sequences from its end
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
            if count == 0:  # its newest token alone, and no budget for the tokens proposed after it
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
        """(tokens of a sequence to compute, proposed tokens to verify after them), within the budget."""
        count, most = min(sequence.waiting_tokens, budget), self._most_proposals(sequence)
        if self.whole_prompts and count < sequence.waiting_tokens:
            return 0, 0
        if not most or count < sequence.waiting_tokens:
            return count, 0
        places = self.propose(sequence, most)
        if places and (count + places > budget or (self.newest_alone and count > 1)):
            return count - 1, 0  # the newest token waits for a step with room for all proposals
        return count, places

    def _most_proposals(self, sequence: Sequence) -> int:
        """Most proposed tokens: 0 before the answer's first token, and few enough that one more may follow them all."""
        if len(sequence.tokens) == sequence.prompt_length:
            return 0
        return min(self.lookahead, sequence.most_tokens - len(sequence.tokens) - 1)

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence: assign cached pages of its beginning, and a slot. False if it has to wait."""
        seats = len(self._forks.get(sequence.request_id, ())) + 1 if sequence.index == 0 else 1
        taken = len(self.running) + sum(len(self._forks.get(s.request_id, ())) for s in self.running if s.index == 0)
        if taken + seats > self.max_num_seqs:
            return False
        blocks, root = self.blocks, (self.version, sequence.request.adapter, sequence.request.root)
        known = sequence.findable if blocks.reuse else []
        found, parent = blocks.find(known, root)
        # Pages for all its tokens and the next one, though it takes them by chunks: else it would soon be preempted.
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
        """Assign pages for `count` more tokens, preempting later sequences if needed. False if it had to be itself."""
        while not self._grow(sequence, count, copies):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Assign pages for the next `count` tokens, and replace a shared one by a copy. False if there are too few."""
        blocks, size = self.blocks, self.blocks.page_size
        more = blocks.pages_for(sequence.computed + count) - len(sequence.pages)  # below 0 after rejected tokens
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
        """Free a running sequence's pages and requeue it in order of arrival, to be computed again from its start."""
        self._give_back(sequence)
        self.running.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        place = sum(_arrival(other) < _arrival(sequence) for other in self.waiting)
        self.waiting.insert(place, sequence)

    def computed(self, chunk: Chunk, accepted: int = 0) -> list[Sequence]:
        """Record that a chunk was computed.

        Args:
            chunk: the chunk.
            accepted: number of its proposed tokens that were accepted; they are in the sequence's `tokens` already.

        Returns:
            The forks that start now: the other answers to the prompt, which draw from the same logits.
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
        """Remove a sequence that has its `reason` from running or waiting, and free its pages."""
        assert sequence.reason is not None, "a sequence ends for a reason"
        if sequence in self.running:
            self._give_back(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request.

        Returns:
            Those that were not finished.
        """
        found = [s for s in (*self.running, *self.waiting) if s.request_id == request_id]
        found += self._forks.pop(request_id, [])
        for sequence in found:
            sequence.reason = FinishReason.ABORT
            self.finish(sequence)
        return found

    def new_weights(self, version: int) -> None:
        """The weights have changed: preempt all running sequences, and reuse no older page (another root)."""
        self.version = version
        for sequence in list(self.running):
            self.preempt(sequence)
        for sequence in self.waiting:
            if not sequence.answer:  # one version scores the whole prompt
                sequence.prompt_log_probs.clear()
                sequence.prompt_top.clear()

    def _give_back(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):  # last page first: the beginning of a sequence is evicted last
            self.blocks.release(page)
        sequence.pages, sequence.computed, sequence.lag = [], 0, 0
        if self._free_slots is not None and sequence.slot:
            self._free_slots.append(sequence.slot)
        sequence.slot = 0
