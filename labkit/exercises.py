"""How a lab declares its exercises: what is called, on which inputs, what is right, and what to say when it is not.

A lab is a package, `course/NN_name`, that ends in a `LAB`; the files of its `checks/` declare the exercises. The
smallest complete one::

    def total(ranks):                                   # the judge's own answer, never shown to the learner's process
        return [sum(r["x"] for r in ranks)] * len(ranks)

    def some_ranks(draw):                               # hidden: drawn from the check's seed
        shape = draw.integer(1, 9), draw.integer(1, 9)
        return [{"x": draw.tensor(*shape)} for _ in range(draw.integer(2, 4))]

    LAB = Lab("01_process_groups", [
        Exercise(
            "ring_all_reduce",
            reference=total,
            cases=[
                Case("two ranks, two numbers", [{"x": torch.ones(2)}, {"x": torch.zeros(2)}], points=1),
                Case("other sizes, up to four ranks", some_ranks, points=3, hidden=True),
                Case("only neighbours talk", some_ranks, points=1, hidden=True, accept=[only("send", "recv")]),
            ],
            idea="What has a rank that passes on what it got, after N-1 steps?",
            hint="N-1 times: send what came last (first: a copy of x) to rank + 1, receive from rank - 1, add it.",
        ),
    ])

| a case's `inputs`      | the learner's function runs                  | `reference` is called | and returns          |
|------------------------|----------------------------------------------|-----------------------|----------------------|
| a dict                 | alone, with no process group: `f(**inputs)`  | `reference(**inputs)` | the answer           |
| a list of dicts        | on so many ranks, each with its own dict     | `reference(inputs)`   | a list, one per rank |
| a function of a `Draw` | as what it returns says                      |                       |                      |

On ranks the default process group (gloo) is initialised when the function is called, and not yet when its cell is
imported: scripts import it before they begin. The learner's process gets nothing but the inputs, so neither references
nor expected values can be read there; for the same reason `drive`, which calls code that is not one plain function (a
class, a backward pass), travels as source text and must do its own imports. No call may change its inputs, unless
`changes` names them::

    def forward_backward(exercise, x):
        x.requires_grad_()
        y = exercise.f(x)
        y.sum().backward()
        return {"y": y, "grad": x.grad}

**A case is one or several trials**: its inputs, and those of `fixed`, which are tried in every grading; the row's
points are for all of them. A wrong answer that passes by luck on drawn inputs is found by a fixed one, always. Beside
them every exercise on ranks is tried in settings that its author does not write (`labkit.settings`): tensors that are
not contiguous, float64, ranks that stand beside the group. For the last, name the input through which the group comes::

    Exercise("rank_loss", ..., group="group")                    # rank_loss(..., group=<ProcessGroup>)
    Exercise("ring_forward", ..., axis="cp")                     # ring_forward(..., cp=<Axis>)
    Exercise("finish", ..., axis={"dp": None, "edp": by_expert}) # two axes; by_expert(inputs) -> [[0, 2], [1, 3]]

Where no single answer is right (a schedule, an overlap, bytes sent) `accept` judges instead of, or after, the
reference: functions of an `Answer` that return None or a sentence about what is wrong (`labkit.checks` has
some ready-made).
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import importlib
import inspect
import pkgutil
import random
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.evidence import Evidence
from minimegatron.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from labkit.fresh import Nursery

Inputs = dict[str, Any] | list[dict[str, Any]]
GIVEN = ("mark", "late")  # functions of `process_group` that the player gives to a drive
# The groups that the ranks of a case fall into, each a list of their places: `split(inputs) -> [[0, 2], [1, 3]]`.
Split = Callable[[list[dict[str, Any]]], list[list[int]]]
Groups = str | Mapping[str, Split | None]


class Draw:
    """Inputs from a seed: the same seed gives the same inputs, wherever it runs."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return self.random.randint(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers of this shape."""
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def sizes(self, n: int, low: int, high: int) -> list[int]:
        """`n` numbers from `low` to `high`, never all the same; where `low` is 0, half of the draws hold a zero."""
        if n < 2 or low >= high:
            raise ConfigError(f"{n} sizes from {low} to {high} cannot differ", where="Draw.sizes")
        found = [self.integer(low, high) for _ in range(n)]
        one, other = self.random.sample(range(n), 2)
        if low == 0 and self.random.random() < 0.5:
            found[one] = 0
        if len(set(found)) == 1:
            found[other] = self.choice([size for size in range(low, high + 1) if size != found[one]])
        return found

    def shape(self, dims: int, low: int = 1, high: int = 6) -> list[int]:
        """A size for each dim, from `low` to `high`, all different: a mixed-up dim cannot pass."""
        if high - low + 1 < dims:
            raise ConfigError(f"{dims} different sizes from {low} to {high}: there are fewer", where="Draw.shape")
        return self.random.sample(range(low, high + 1), dims)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What `accept` judges.

    Attributes:
        value: what the learner's function returned; on ranks a list, one value per rank.
        inputs: what it was called with, as the case gave it.
        evidence: what it did, one per rank (one in all when it ran alone).
    """

    value: Any
    inputs: Any
    evidence: list[Evidence]


Accept = Callable[[Answer], str | None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table that `check` shows.

    Attributes:
        what: the row's text; says what is tried, never what the answer is.
        inputs: a dict, a list of dicts, or a function of a `Draw` that returns one of the two.
        points: given when the answer is right, else none.
        hidden: draw the inputs from the check's seed, and show neither them nor the answers.
        accept: judges after those of the exercise.
        reference: in place of the exercise's.
        fixed: further inputs that are always tried, each a dict, a list of dicts or a function of a `Draw` whose seed
            never changes; shown or hidden as the case is.
        draws: how many times a hidden case draws; by default 3 where that is cheap (`settings.draws_of`), else 1.
        errors: {words of an error, or of a judge of right values: what the mistake is}, where this is the first case
            that fails.
    """

    what: str
    inputs: Inputs | Callable[[Draw], Inputs]
    points: int = 1
    hidden: bool = False
    accept: Sequence[Accept] = ()
    reference: Callable[..., Any] | None = None
    fixed: Sequence[Inputs | Callable[[Draw], Inputs]] = ()
    draws: int | None = None
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def draw(self, seed: int | str) -> Inputs:
        """The inputs; `seed` is used only by a hidden case."""
        if not callable(self.inputs):
            return self.inputs
        return self.inputs(Draw(seed if self.hidden else self.what))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What `Exercise.prepare` makes of a cell: `data` for the lab's tools, or the `outcome` of every case, `{"error":
    text}` or `{"todo": exercise}` (`labkit.playing`)."""

    data: Any = None
    outcome: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One idea that the learner implements in one cell, `%%exercise name`.

    Attributes:
        name: of the cell, of the module `exercises.name`, and by default of the function.
        cases: what is tried, in this order.
        reference: gives the right answer; may be None where `accept` decides alone.
        function: name of the learner's function; by default the exercise's name.
        drive: calls the learner's module in another way than `function(**inputs)`.
        accept: judges of every case, after the comparison with the reference.
        errors: {words of an error: what the mistake is}, where an error comes in place of an answer.
        idea: one sentence that points the way, without code: shown from the second failure on.
        hint: the recipe, shown when the learner asks for it: `hint("name")`.
        outputs: names of the values where an answer is a tuple of several: `("dq", "dk", "dv")`. A learner is told
            which of them is wrong, in a hidden case too.
        counted: an answer is a list of names, which are what the learner is to find: told is how many are wrong.
        seconds: for one case, from the moment its ranks have started.
        prepare: called by the judge before the learner's process: `prepare(nursery, cell, hidden)` returns what the
            lab's tools find as `labkit.tools.prepared`, or the outcome of every case (`Prepared`).
        rtol, atol: of floating-point answers; None takes the defaults of the dtype (`compare.TOLERANCES`).
        changes: inputs that the call may change; all others are compared with what was given.
        late: on ranks, an input, a list of numbers, that the function does not get; `drive` hands them out one by one
            by `late(i)`, and each moment is in the evidence.
        group: name of the input through which a process group comes; several: {name: how the ranks are split, or
            None for all of them together}. A drive gets it by this name.
        axis: the same, as `minimegatron.comm.axis.Axis`.
        without: modules that do what the exercise asks for; the learner's process cannot import them (`closing`).
        dtypes: floating-point types that it must work with; without float64 the trial in float64 is left out.
    """

    name: str
    cases: Sequence[Case]
    reference: Callable[..., Any] | None = None
    function: str = ""
    drive: Callable[..., Any] | None = None
    accept: Sequence[Accept] = ()
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    idea: str = ""
    hint: str = ""
    outputs: Sequence[str] = ()
    counted: bool = False
    seconds: float = 20.0
    prepare: Callable[[Nursery, str, str], Prepared] | None = None
    rtol: float | None = None
    atol: float | None = None
    changes: Sequence[str] = ()
    late: str = ""
    group: Groups = ""
    axis: Groups = ""
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64)
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"{self.name!r} cannot name an exercise", fix="it becomes a module: use an identifier")
        if not self.cases:
            raise ConfigError("an exercise needs at least one case", where=self.name)
        for case in self.cases:
            if not (case.reference or self.reference or case.accept or self.accept):
                raise ConfigError(
                    f"nothing says when `{case.what}` is right", where=self.name, fix="give a reference or an accept"
                )
        self._stands_alone()

    @property
    def points(self) -> int:
        return sum(case.points for case in self.cases)

    @property
    def groups(self) -> list[tuple[str, bool, Split | None]]:
        """(name of the input, whether it is an `Axis`, split) of each group that the judge makes."""
        named = [(self.group, False), (self.axis, True)]
        return [
            (name, as_axis, split)
            for groups, as_axis in named
            if groups
            for name, split in ({groups: None} if isinstance(groups, str) else groups).items()
        ]

    @property
    def drive_source(self) -> str | None:
        """The text of `drive`."""
        return None if self.drive is None else textwrap.dedent(inspect.getsource(self.drive))

    def _stands_alone(self) -> None:
        """Refuse a drive that uses a name from outside of itself."""
        names = [] if self.drive is None else sorted(_outside(self.drive.__code__) - set(GIVEN))
        if self.drive is not None and names:
            raise ConfigError(
                f"drive uses {', '.join(names)} from outside of itself",
                where=f"{self.name}: {self.drive.__qualname__}",
                fix="it runs in the learner's process as text: import inside the function, pass values as inputs",
            )


@functools.cache  # a lab makes each exercise twice, in every process that draws or decides
def _outside(code: types.CodeType) -> frozenset[str]:
    """Names that code takes from around it, other than Python's own."""
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset({*loaded, *code.co_freevars} - set(dir(builtins))).union(
        *(_outside(c) - {*code.co_cellvars} for c in inner)
    )


class Lab:
    """The exercises of one notebook, in its order.

    Args:
        name: the notebook's file name without `.ipynb`, e.g. `01_process_groups`.
        exercises: each with a name of its own.
        without: modules that no exercise of it may import, beside its own `without`.
    """

    def __init__(self, name: str, exercises: Sequence[Exercise], without: Sequence[str] = ()) -> None:
        self.name = name
        self.exercises = {
            exercise.name: dataclasses.replace(exercise, without=(*exercise.without, *without))
            for exercise in exercises
        }
        if len(self.exercises) != len(exercises):
            raise ConfigError("two exercises have the same name", where=f"lab {name}")

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises.values())

    def __getitem__(self, name: str) -> Exercise:
        if name not in self.exercises:
            raise ConfigError(
                f"lab {self.name} has no exercise `{name}`",
                fix=did_you_mean(name, self.exercises) or f"it has {', '.join(self.exercises)}",
            )
        return self.exercises[name]


def find_lab(package: str, wanted: str) -> str:
    """The name of a course's lab, from its name or its number: "1", "01" or "01_process_groups".

    Raises:
        ConfigError: there is no such lab; the message names those that there are.
    """
    there = sorted(one.name for one in pkgutil.iter_modules(importlib.import_module(package).__path__) if one.ispkg)
    number = f"{int(wanted):02}_" if wanted.isdecimal() else "?"
    named = [name for name in there if name == wanted or name.startswith(number)]
    if not named:
        what = f"there is no lab `{wanted}`" if wanted else "%lab needs the name or the number of a lab"
        raise ConfigError(what, fix=did_you_mean(wanted, there) or f"the labs are {', '.join(there)}")
    return named[0]


def load_lab(module: str) -> Lab:
    """The `LAB` of a course module, named as an import would name it.

    Raises:
        ConfigError: there is no such module, or it has no LAB.
    """
    try:
        lab = getattr(importlib.import_module(module), "LAB", None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(f"there is no lab `{module.rpartition('.')[2]}`", where=f"no module {module}") from None
    if not isinstance(lab, Lab):
        raise ConfigError("a course module must define LAB = Lab(...)", where=module)
    return lab
