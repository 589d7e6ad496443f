"""Random requests over a memory of canaries: nobody reads what is not theirs, nobody waits for ever, nothing is lost.

Each row of the memory holds what a model's keys and values would depend on: the version of the weights, the salt, and
all tokens up to the row's own. Attention would read every row of a sequence, so every row is compared, in every step.
"""

from __future__ import annotations

import collections

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minimegatron.errors import DataError
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import FinishReason, Request

ALPHABET = 3


class Token(int):
    """A token whose hash is that of all others."""

    def __hash__(self):
        return 0


def drawn(request, index, tokens):
    """The token that follows: of its seed, its index and all before it."""
    value = 5 * request.seed + 3 * index + sum(i * token for i, token in enumerate(tokens, 1))
    return type(tokens[0])(value % 7 % ALPHABET)


def alone(request, index):
    """The answer that a request gets without neighbours."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        tokens.append(drawn(request, index, tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.prompt) :]


def guessed(sequence, count):
    """What follows, with a mistake in one place or in none."""
    tokens, found = list(sequence.tokens), []
    wrong = (len(tokens) + sequence.request.seed) % (count + 2)
    for i in range(count):
        token = drawn(sequence.request, sequence.index, tokens)
        tokens.append(type(token)((token + (i == wrong)) % ALPHABET))
        found.append(tokens[-1])
    return found


def arrived(sequence):
    return sequence.arrival, sequence.index


class Simulated:
    """An engine whose model is a memory of canaries."""

    def __init__(self, num_pages, page_size, max_num_seqs, max_num_batched_tokens, has_slots=False, lookahead=0):
        self.blocks = BlockManager(num_pages, page_size, reuse=not has_slots)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, max_num_batched_tokens, 1000, has_slots, lookahead)
        self.size, self.has_slots = page_size, has_slots
        self.pages = collections.defaultdict(lambda: [None] * page_size)
        self.slots = {}
        self.live = {}
        self.added = self.steps = 0
        self.in_step = False

    def add(self, request):
        """A request arrives; returns its sequences."""
        self.added += 1
        self.live[self.added] = self.scheduler.add(request, str(self.added))
        return self.live[self.added]

    def canary(self, sequence, upto):
        request = sequence.request
        return (
            self.scheduler.version,
            request.adapter,
            request.salt,
            tuple([*sequence.tokens, *sequence.proposed][:upto]),
        )

    def step(self):
        """Plan, compute and draw."""
        scheduler = self.scheduler
        oldest = scheduler.running[0] if scheduler.running else None
        plan = scheduler.schedule()
        self.steps, self.in_step = self.steps + 1, True
        chunks = plan.chunks
        assert bool(chunks) == scheduler.has_work, "something can be computed as long as somebody waits"
        assert plan.tokens <= scheduler.max_num_batched_tokens
        assert all(chunk.count > 0 and chunk.sequence in scheduler.running for chunk in chunks)
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert oldest is None or any(chunk.sequence is oldest for chunk in chunks), "the oldest advances"
        for chunk in chunks:
            chunk.sequence.proposed = guessed(chunk.sequence, chunk.proposals)
        self.compute(plan)
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.proposals:
                self.verify(chunk)
                continue
            forks = scheduler.computed(chunk)
            assert chunk.draws == (sequence.computed == len(sequence.tokens)) and (chunk.draws or not forks)
            for each in (sequence, *forks) if chunk.draws else ():
                each.append(drawn(each.request, each.index, each.tokens))
                if each.reason is not None:
                    assert each.answer == alone(each.request, each.index)
                    self.over(each)
        self.in_step = False

    def verify(self, chunk):
        """Proposed tokens are taken up to the first that is not what is drawn, which is taken in its place."""
        sequence, proposed, taken = chunk.sequence, chunk.sequence.proposed, 0
        assert chunk.draws, "nothing is proposed behind a part of a prompt"
        while sequence.reason is None:
            sequence.append(drawn(sequence.request, sequence.index, sequence.tokens))
            taken += 1
            if taken > len(proposed) or sequence.tokens[-1] != proposed[taken - 1]:
                break
        sequence.proposed = []
        assert not self.scheduler.computed(chunk, taken - 1)
        if sequence.reason is not None:
            assert sequence.answer == alone(sequence.request, sequence.index)
            self.over(sequence)

    def compute(self, plan):
        """What a model would do with its memory."""
        for memory, pairs in ((self.pages, plan.copies), (self.slots, plan.slot_copies)):
            before = [memory[source] for source, _ in pairs]  # all are read before one is written
            assert len({to for _, to in pairs}) == len(pairs), "which of two copies came last?"
            for value, (_, to) in zip(before, pairs, strict=True):
                memory[to] = list(value) if memory is self.pages else value
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count + chunk.proposals
            for j in range(chunk.start, end):
                page = sequence.pages[j // self.size]
                assert page != 0 and self.blocks.users(page) == 1, "a page is written while it is shared"
                self.pages[page][j % self.size] = self.canary(sequence, j + 1)
            if self.has_slots:
                assert chunk.start == 0 or self.slots[sequence.slot] == self.canary(sequence, chunk.start)
                self.slots[sequence.slot] = self.canary(sequence, end)
        for chunk in plan.chunks:
            for j in range(chunk.start + chunk.count + chunk.proposals):
                row = self.pages[chunk.sequence.pages[j // self.size]][j % self.size]
                assert row == self.canary(chunk.sequence, j + 1), "somebody else's row is read"

    def over(self, sequence):
        """A sequence has come to its end."""
        self.scheduler.finish(sequence)
        number = int(sequence.request_id)
        if all(each.reason is not None for each in self.live[number]):
            del self.live[number]

    def check(self):
        """Pages, seats and slots are counted rightly."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.blocks.check([sequence.pages for sequence in running])
        assert not any(sequence.pages or sequence.slot or sequence.computed for sequence in waiting)
        assert [*map(arrived, running)] == sorted(map(arrived, running))
        assert [*map(arrived, waiting)] == sorted(map(arrived, waiting))
        assert len(running) <= self.scheduler.max_num_seqs
        slots = [sequence.slot for sequence in running]
        assert sorted(set(slots)) == sorted(slots) and 0 not in slots if self.has_slots else not any(slots)

    def drain(self):
        """All come to their end: the oldest that runs gets a token in each step, until an older one comes back.

        That happens to each at most once, so they need no more steps than twice their tokens.
        """
        bound = self.steps + 2 * sum(sequence.most_tokens for sequences in self.live.values() for sequence in sequences)
        while self.scheduler.has_work:
            assert self.steps < bound, "somebody waits for ever"
            self.step()
            self.check()
        assert not self.live and self.blocks.available == self.blocks.capacity


class Machine(RuleBasedStateMachine):
    """What may happen to a scheduler, in any order."""

    steps = 0  # of all runs

    @initialize(
        pages=st.integers(2, 8),
        size=st.integers(1, 4),
        seqs=st.integers(1, 4),
        more=st.integers(0, 6),
        lookahead=st.integers(0, 3),
        has_slots=st.booleans(),
        token=st.sampled_from([int, Token]),
    )
    def begin(self, pages, size, seqs, more, lookahead, has_slots, token):
        lookahead *= not has_slots  # a state cannot be put back
        self.engine = Simulated(1 + pages, size, seqs, seqs * (1 + lookahead) + more, has_slots, lookahead)
        self.token = token

    @rule(
        pages=st.integers(0, 3),
        more=st.integers(-1, 1),
        odd=st.integers(0, 9),
        new=st.integers(1, 8),
        n=st.sampled_from([1, 1, 2, 3]),
        stop=st.sampled_from([(), (1,), (0, 2)]),
        seed=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        adapter=st.sampled_from(["", "", "tenant"]),
    )
    def add(self, pages, more, odd, new, n, stop, seed, salt, adapter):
        """A prompt around the size of pages, which differs from most others in one place."""
        engine, scheduler = self.engine, self.engine.scheduler
        length = max(1, pages * engine.size + more)
        prompt = tuple(self.token(i == odd) for i in range(length))
        stops = frozenset(map(self.token, stop))
        request = Request(prompt, new, stop_ids=stops, seed=seed, n=n, salt=salt, adapter=adapter)
        if n > scheduler.max_num_seqs or length + new > engine.blocks.capacity * engine.size:
            with pytest.raises(DataError):
                scheduler.add(request, "refused")
        else:
            assert [sequence.index for sequence in engine.add(request)] == [*range(n)]

    @rule(count=st.integers(1, 3))
    def step(self, count):
        for _ in range(count):
            self.engine.step()
            self.engine.check()
        type(self).steps += count

    @precondition(lambda self: self.engine.live)
    @rule(which=st.integers(0, 9))
    def abort(self, which):
        number = [*self.engine.live][which % len(self.engine.live)]
        sequences = self.engine.live.pop(number)
        left = {id(sequence) for sequence in sequences if sequence.reason is None}
        assert {id(sequence) for sequence in self.engine.scheduler.abort(str(number))} == left
        assert all(sequence.reason is not None for sequence in sequences)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.integers(0, 9))
    def finish(self, which):
        """A caller has found a stop string."""
        running = self.engine.scheduler.running
        sequence = running[which % len(running)]
        if sequence.answer:
            sequence.reason = FinishReason.STOP
            self.engine.over(sequence)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.integers(0, 9))
    def preempt(self, which):
        running = self.engine.scheduler.running
        self.engine.scheduler.preempt(running[which % len(running)])

    @rule()
    def new_weights(self):
        self.engine.scheduler.new_weights(self.engine.scheduler.version + 1)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine") and not self.engine.in_step:  # otherwise it has failed there
            self.engine.drain()


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming():
    engine = Simulated(1 + 8, 2, 3, 3)
    for _ in range(5):
        engine.add(Request((0, 1), 4))
    (long,) = engine.add(Request((1,) * 12, 4))
    while long.reason is None:
        engine.add(Request((0,), 3))
        engine.step()
        assert engine.steps <= 5 * 6 + 16, "its wait depends on those that came later"
    assert all(sequence.arrival < 20 for sequence in engine.scheduler.running)


@pytest.mark.parametrize("length, cached", [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_what_is_found_is_all_but_the_last_token_in_whole_pages(length, cached):
    """With pages of 4. What is in use is found as what has been released is; and counted when it is admitted."""
    engine, prompt = Simulated(1 + 4, 4, 2, 20), tuple(i % 3 for i in range(length))
    for n, found in ((1, 0), (1, cached), (2, cached)):
        first, *_ = engine.add(Request(prompt, 1, n=n))
        engine.step()
        assert first.cached == found and first.reason is FinishReason.LENGTH
    for other in ({"salt": "another"}, {"adapter": "another"}):
        (fresh,) = engine.add(Request(prompt, 1, **other))
        engine.step()
        assert fresh.cached == 0
    assert (engine.blocks.hits, engine.blocks.asked) == (2 * cached, 5 * length)


def test_a_request_that_waits_for_pages_is_counted_once():
    engine, prompt = Simulated(1 + 4, 2, 2, 8), (0, 1, 2, 0, 1)
    engine.add(Request(prompt, 3))
    engine.step()
    (second,) = engine.add(Request((2, *prompt), 1))
    for _ in range(2):
        engine.step()
        assert second.reason is None and engine.blocks.asked == 5
    engine.drain()
    assert engine.blocks.asked == 5 + 6 and engine.scheduler.preemptions == 0


def test_a_fork_does_not_take_the_pages_of_a_chunk_that_is_planned():
    """It arrived before its neighbour, and begins when that one runs already."""
    engine = Simulated(1 + 5, 2, 3, 5)
    engine.add(Request((0,) * 4, 2, n=2))
    engine.add(Request((0,) * 4, 1))
    engine.drain()


def test_a_slot_that_is_given_up_at_once_is_copied_to_once():
    """Both requests fork in one step; the first one's fork is over with its first token, the other's has its slot."""
    engine = Simulated(1 + 4, 2, 4, 4, has_slots=True)
    engine.add(Request((0,), 1, n=2))
    engine.add(Request((0,), 2, n=2))
    engine.drain()


def run_machine(examples, **options):
    """Random runs; returns how many steps they took."""
    Machine.steps = 0
    how = settings(max_examples=examples, stateful_step_count=40, database=None, **options)
    run_state_machine_as_test(Machine, settings=how)
    return Machine.steps


@pytest.mark.slow
def test_memory_is_shared_as_if_it_were_not():
    """The same runs each time, so that a mistake that is noticed once is noticed always."""
    assert run_machine(280, derandomize=True, phases=[Phase.generate]) >= 3_000


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_memory_is_shared_for_100_000_steps():
    assert run_machine(6_000) >= 100_000
