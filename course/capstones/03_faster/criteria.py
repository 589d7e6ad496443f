"""What is asked of a faster run: the same numbers, step by step of the learner's list, and gains that are there.

| criteria           | from                                                                                        |
|--------------------|---------------------------------------------------------------------------------------------|
| steps, functions   | `faster.toml`, its files; calls of the functions beside the judge's own                      |
| same               | losses and gradient norms of all rungs, on data that are drawn                               |
| faster, gains      | the ladder: CPU-seconds in paired rounds (`ladder`)                                         |
| predicted          | the learner's numbers beside the ladder's                                                   |

No criterion is about seconds: each gain is a share of the step before. CPU-seconds do not count who waits, and where
quartiles lie on both sides of what decides, there are more rounds. So other work on the machine changes no verdict.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from labkit.acceptance import Criteria, Missed, once, read_tables, require
from minimegatron.errors import ConfigError, MinimegatronError

from . import work
from .functions import VALUE, changed_functions, compare
from .ladder import Ladder
from .work import Rung, Seen

LEAST_STEPS, LEAST_GAIN = 3, 20.0  # of the list; percent
LOSS, NORM = 5e-4, 5e-3  # nats; a gradient norm's share
NEAR, FACTOR = 5.0, 2.0  # points and factor between what is said and what is measured
FIELDS, WORDS, MORE_WORDS = 3, 40, 100  # of a step; letters of a why, and of one that was wrong


@dataclasses.dataclass(frozen=True)
class Change:
    """A step of the list.

    Attributes:
        name: of a few words.
        fields: {field: value} that it sets, none with `own`; the default of one that it unsets.
        own: name of a file with the run's own functions, "" for the file before.
        predicted, measured: percent fewer CPU-seconds than the step before.
        why: it is faster, and where the prediction went wrong.
    """

    name: str
    fields: Mapping[str, Any]
    own: str
    predicted: float
    measured: float
    why: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `faster.toml` says.

    Attributes:
        steps: the list.
        measured: percent fewer CPU-seconds of all steps together.
    """

    steps: Sequence[Change]
    measured: float


def read_plan(path: Path) -> Plan:
    """A `faster.toml`.

    Raises:
        ConfigError: it is none, or something is missing in it.
    """
    tables = read_tables(path, "step", "whole")
    rows = tables["step"]
    if not isinstance(rows, list) or not rows:
        raise ConfigError("it has no step", where=str(path), fix="[[step]] for each change")
    steps = []
    for number, row in enumerate(rows, 1):
        row = dict(row)
        change = Change(
            str(row.pop("name", "")), fields_of(row.pop("set", {}), row.pop("unset", [])), str(row.pop("own", "")),
            row.pop("predicted", None), row.pop("measured", None), str(row.pop("why", "")),
        )  # fmt: skip
        for name in ("predicted", "measured"):
            value = getattr(change, name)
            if type(value) not in (int, float) or value >= 100:
                what = f"step {number} has {name} = {value!r}"
                raise ConfigError(what, where=str(path), fix="percent fewer CPU-seconds than the step before")
        if row or not change.name:
            what = f"step {number} has {', '.join(row) or 'no name'}"
            raise ConfigError(what, where=str(path), fix="name; set, unset or own; predicted, measured, why")
        steps.append(change)
    measured: Any = tables["whole"].get("measured") if isinstance(tables["whole"], dict) else None
    if type(measured) not in (int, float) or measured >= 100:
        raise ConfigError(f"[whole] measured is {measured!r}", where=str(path), fix="percent fewer CPU-seconds")
    return Plan(steps, measured)


def fields_of(values: Any, without: Any) -> dict[str, Any]:
    """The fields that a step sets, and those that get their default again.

    Raises:
        ConfigError: no table, no list of names, a field that is not there.
    """
    if not isinstance(values, dict) or not isinstance(without, list):
        what = f"set = {values!r}, unset = {without!r}"
        raise ConfigError(what, fix='set = { field = value }, unset = ["field"]')
    return {**values, **{name: work.default(str(name)) for name in without}}


@dataclasses.dataclass
class Session:
    """One grading.

    Attributes:
        folder, plan: what was handed in.
        random: draws what is asked.
        train: takes some steps of a rung with a seed: the CPU-seconds of both ranks together.
        call: calls a function of (rank, world, ...) on a rank, for what the learner wrote is called in it.
        rounds, most: of the ladder, at least and at most.
    """

    folder: Path
    plan: Plan
    random: Random
    train: Callable[[Rung, int], Seen]
    call: Callable[..., Any]
    rounds: int
    most: int

    def __post_init__(self) -> None:
        self.seed = self.random.randrange(1, 2**31)

    @once
    def rungs(self) -> list[Rung]:
        """The baseline, and the run after each step.

        Raises:
            Missed: a step that changes what it may not, or more than one thing.
        """
        steps, original = self.plan.steps, Path(__file__).parent / "start" / "own.py"
        require(len(steps) >= LEAST_STEPS, f"{len(steps)} steps: {LEAST_STEPS} or more")
        names = [step.name for step in steps]
        require(len(set(names)) == len(names), f"two steps have one name: {', '.join(names)}")
        rungs = [Rung("baseline", {}, original)]
        for step in steps:
            before = rungs[-1]
            own = self.folder / step.own if step.own else before.own
            if step.own and not own.is_file():
                raise Missed(f"`{step.name}`: there is no file {step.own}")
            self._one_thing(step, before, own)
            rungs.append(Rung(step.name, {**before.fields, **step.fields}, own))
        return rungs

    def _one_thing(self, step: Change, before: Rung, own: Path) -> None:
        """Raise `Missed` unless a step changes one thing that may change."""
        changed = changed_functions(before.own, own) if step.own else set()
        for name in step.fields:
            try:
                work.refuse(name)
            except ConfigError as error:
                raise Missed(f"`{step.name}`: {error.what}") from None
        require(bool(changed) != bool(step.fields), f"`{step.name}` sets {len(step.fields)} fields and changes "
                f"{len(changed)} functions: one or the other")  # fmt: skip
        more = ", ".join(sorted(changed))
        require(len(changed) < 2, f"`{step.name}` changes {more}: which of them is faster? a step changes one")
        told = f"`{step.name}` sets {len(step.fields)} fields: at most {FIELDS} that belong together"
        require(len(step.fields) <= FIELDS, told)
        try:
            work.run_of({**before.fields, **step.fields}, 1, 1)
        except ConfigError as error:
            raise Missed(f"`{step.name}`: {error}") from None

    @once
    def first_round(self) -> Ladder:
        """Each rung once: whether it trains, and with which losses."""
        rungs = self.rungs()

        def measure(number: int) -> Seen:
            try:
                return self.train(rungs[number], self.seed)
            except MinimegatronError as error:
                raise Missed(f"`{rungs[number].name}`: {error.what}") from None

        ladder = Ladder(len(rungs), measure)
        ladder.round()
        return ladder

    @once
    def ladder(self) -> Ladder:
        """All rungs in paired rounds, until both quartiles of each gain lead to one verdict."""
        ladder = self.first_round()

        def undecided() -> bool:
            ends = ladder.quartiles(0, ladder.rungs - 1)
            verdicts = [[gain >= LEAST_GAIN for gain in ends]]
            verdicts += [[near(said, gain) for gain in ladder.quartiles(a, b)] for _, said, a, b in self.claims()]
            return any(low != high for low, high in verdicts)

        ladder.climb(undecided, self.rounds, self.most)
        return ladder

    def claims(self) -> list[tuple[str, float, int, int]]:
        """(Name, gain that was measured by the learner, the two rungs) of each step and of the whole."""
        steps = self.plan.steps
        claims = [(step.name, step.measured, number, number + 1) for number, step in enumerate(steps)]
        return [*claims, ("[whole]", self.plan.measured, 0, len(steps))]


Try = Callable[[Session], str]
CRITERIA = criterion = Criteria[Try]()


@criterion(
    10,
    f"{LEAST_STEPS} steps or more; each sets at most {FIELDS} fields that say how and not what is computed, or changes "
    "one function of its own; every rung trains on two ranks",
)
def steps(session: Session) -> str:
    """The list, and whether it runs."""
    return f"{session.first_round().rungs - 1} steps, and every rung trains"


@criterion(
    15,
    f"`batch` and `token_losses` of the last rung give what those of the start do: every bit, the losses and their "
    f"gradient to {VALUE:g}; shapes and dtypes; inputs stay as they are",
)
def functions(session: Session) -> str:
    """On inputs that are drawn: starts that overlap, the last sample, documents that end."""
    rungs = session.rungs()
    told, agree = session.call(compare, rungs[0].own, rungs[-1].own, session.seed)
    require(agree, told)
    return str(told)


@criterion(
    20,
    f"every rung has the losses of the one before within {LOSS:g} nats, and its gradient norms within "
    f"{100 * NORM:g} %, in every step",
)
def same(session: Session) -> str:
    """On data and weights that are drawn."""
    rungs, seen = session.rungs(), session.first_round().seen
    worst = 0.0
    for number in range(1, len(rungs)):
        one, other = seen[number - 1], seen[number]
        for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True), 1):
            told = f"`{rungs[number].name}`: step {step} has the loss {b:.5f}, where it was {a:.5f}"
            require(abs(a - b) <= LOSS, told)
            worst = max(worst, abs(a - b))
        for step, (a, b) in enumerate(zip(one.norms, other.norms, strict=True), 1):
            told = f"`{rungs[number].name}`: step {step} has the gradient norm {b:.5f}, where it was {a:.5f}"
            require(abs(a - b) <= NORM * a, told)
    return f"losses of {len(rungs)} rungs agree to {worst:.1g}"


@criterion(
    25,
    f"the last rung takes at least {LEAST_GAIN:g} % fewer CPU-seconds than the baseline, in the median of paired "
    "rounds",
)
def faster(session: Session) -> str:
    """The ends of the ladder."""
    ladder = session.ladder()
    last = ladder.rungs - 1
    ratio = ladder.ratio(0, last)
    told = f"{ladder.told(0, last)} fewer CPU-seconds: {ratio.a:.2f} s a step before, {ratio.b:.2f} s now"
    require(ladder.gain(0, last) >= LEAST_GAIN, told)
    return told


def near(said: float, seen: float) -> bool:
    """Whether a gain in percent has the sign and the order of size of another: of 90 % the cost is a tenth, of 80 % a
    fifth, so what is compared is the logarithm of the cost."""
    a, b = (math.log(1 - gain / 100) for gain in (said, seen))
    return abs(said - seen) <= NEAR or (a * b > 0 and 1 / FACTOR <= a / b <= FACTOR)


@criterion(
    20,
    f"`measured` of each step, and of [whole], has the sign and the size of the gain here: within {NEAR:g} points, or "
    f"a factor of {FACTOR:g} between the logarithms of the costs",
)
def gains(session: Session) -> str:
    """Each rung beside the one before."""
    ladder, wrong = session.ladder(), []
    for name, measured, a, b in session.claims():
        if not near(measured, ladder.gain(a, b)):
            wrong.append(f"{name}: {measured:g} % by you, and here {ladder.told(a, b)}")
    require(not wrong, "; ".join(wrong))
    return "; ".join(f"{name} {measured:g} : {ladder.gain(a, b):.0f} %" for name, measured, a, b in session.claims())


@criterion(
    10,
    f"each step has a `predicted`, and a `why` of {WORDS} letters or more; of {MORE_WORDS} or more where what you "
    "measured is not near, as above",
)
def predicted(session: Session) -> str:
    """The learner's own numbers."""
    short, right = [], 0
    session.rungs()
    for step in session.plan.steps:
        hit = near(step.predicted, step.measured)
        right += hit
        if len(step.why.strip()) < (WORDS if hit else MORE_WORDS):
            short.append(f"`{step.name}` ({len(step.why.strip())} letters, {step.predicted:g} % predicted, "
                         f"{step.measured:g} % measured)")  # fmt: skip
    require(not short, f"too short a why: {'; '.join(short)}")
    return f"{right} of {len(session.plan.steps)} predictions were near"
