"""What is asked of an architecture, and what the answers have to be.

| criteria                                   | held against                                                           |
|--------------------------------------------|------------------------------------------------------------------------|
| formula, gradients                         | the hand-in's own reference; difference quotients                      |
| causal, documents                          | itself, with one token changed                                         |
| tensor_parallel, pipeline, recompute, ...  | itself in one process, in fp64: every tensor (`comparison/twin`)       |
| resharded, generation                      | itself: one checkpoint in two layouts; passes over the whole sequence  |
| planned                                    | tensors that are counted while it trains                               |
| learns                                     | what a model without a memory could reach                              |
| mistakes                                   | the hand-in's own tests, on variants of it (`planting`)                |

Sizes, weights, tokens and mistakes are drawn. All run on ranks on CPUs; no criterion is about seconds.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from labkit.acceptance import Criteria, Missed, require
from labkit.ranks.pool import WarmPool
from minimegatron.checkpoint.commit import folder_of, read_manifest
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.errors import ConfigError, DeadlineError, RankError

from . import trials
from .given.trying import PIECES
from .planting import FILE, Planted, changed, in_other_words, planted, with_source

SECONDS, TESTS_SECONDS = 120.0, 60.0
FORMULA, SLOPE, NOTHING, STATES, AGAIN = 1e-9, 1e-5, 1e-12, 1e-9, 1e-12
GOES_ON = 1e-3  # relative, in fp32, of losses and norms of steps that two layouts take
MEMORY, COMES_AND_GOES = 0.03, 0.08
STEPS, RATE, LEARNED = 150, 1e-2, 1.0
WITHOUT_MEMORY = math.log(trials.TOPICS)
MISTAKES, FEWEST, NOTICED = 12, 8, 0.75
TRIED = 80  # variants that are looked at, until there are so many mistakes
PLAIN = frozenset({"torch", "math", "typing", "collections", "__future__"})
TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclasses.dataclass
class Session:
    """One grading.

    Attributes:
        folder: what was handed in, a copy.
        scratch: an empty folder.
        random: draws what is asked.
        flags: sizes and seed of the models.
    """

    folder: Path
    scratch: Path
    random: Random
    flags: str

    def ask(self, ranks: int, trial: Callable[..., Any], *args: Any, folder: Path | None = None) -> Any:
        """What rank 0 returns from a trial of the hand-in, or of that in another folder, on new ranks.

        Raises:
            Missed: it has failed; with what it raised as its cause.
        """
        seconds = TESTS_SECONDS if trial is trials.tested else SECONDS
        with _first_on_path(self.folder if folder is None else folder), WarmPool(ranks) as pool:
            try:
                return pool.run(trial, *args, timeout=seconds)[0]
            except (RankError, DeadlineError) as error:
                raise Missed(f"{error.what} ({error.where})" if error.where else error.what) from error.__cause__


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def drawn_flags(random: Random) -> str:
    """Sizes of the models of a grading, and the seed of their weights and tokens."""
    heads = random.choice([4, 6])
    sizes = {
        "num-layers": 2,
        "num-attention-heads": heads,
        "hidden-size": heads * random.choice([6, 8, 10]),
        "ffn-hidden-size": random.choice([40, 48, 56]),
        "vocab-size": random.randrange(44, 60),
        "seq-length": random.choice([16, 20, 24]),
        "seed": random.randrange(1, 10**6),
    }
    return " ".join(f"--{name} {value}" for name, value in sizes.items())


CRITERIA: Criteria[Callable[[Session], str]] = Criteria()


# ------------------------------------------------------------------------------------------------------- one process


@CRITERIA(
    10,
    f"in float64 each module of yours gives what `reference` gives for one sequence, within {FORMULA:g} of its largest "
    "output; reference.py imports torch alone",
)
def formula(session: Session) -> str:
    """Two sequences through the model."""
    file = session.folder / "reference.py"
    require(file.is_file(), "there is no reference.py")
    for name in _imports(file):
        require(name in PLAIN, f"reference.py imports {name}: it is to say what {FILE} means without it")
    config, given = session.ask(1, trials.passed, session.flags)
    answers = session.ask(1, trials.referred, file, config, given, folder=session.scratch)
    worst = 0.0
    for one, answer in zip(given, answers, strict=True):
        shapes = f"{one.name} gives {list(one.y.shape[::2])} for a sequence, the reference {list(answer.shape[::2])}"
        require(answer.shape == one.y.shape, shapes)
        off = (answer.double() - one.y).abs()
        at = int(off.amax((1, 2)).nan_to_num(nan=math.inf).argmax())
        distance = float(off[at].max() / one.y.abs().max())
        require(distance <= FORMULA, f"{one.name} is {distance:.1e} away from the reference, most at token {at}")
        worst = max(worst, distance)
    return f"{len(given)} modules, at most {worst:.0e} away"


def _imports(file: Path) -> list[str]:
    """The first words of what a file imports; "." for what lies beside it."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise Missed(f"{file.name} is no Python: {error}") from None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("." if node.level else (node.module or "").split(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval", "open"):
            found.append(node.id)
    return found


@CRITERIA(
    10,
    "in float64 the derivative by every parameter, in a random direction, is that of two forward passes, within "
    f"{SLOPE:g}",
)
def gradients(session: Session) -> str:
    """Autograd beside a difference quotient."""
    found = session.ask(1, trials.slopes, session.flags)
    floor = 1e-3 * max(abs(told) for _, told in found.values())
    for name, (ours, told) in found.items():
        off = abs(ours - told) / max(abs(told), floor)
        require(off <= SLOPE, f"by {name} the backward pass says {ours:.6g}, two forward passes {told:.6g}")
    return f"{len(found)} parameters"


@CRITERIA(5, "no logit depends on a later token or on another sequence; each depends on earlier ones")
def causal(session: Session) -> str:
    """A token is changed."""
    length = int(session.flags.split("--seq-length ")[1].split()[0])
    places = sorted(session.random.sample(range(1, length - 2), 3))
    for place, moved in zip(places, session.ask(1, trials.disturbed, session.flags, places, False), strict=True):
        require(moved.earlier <= NOTHING, f"token {place} moves logits of earlier ones by {moved.earlier:.1e}")
        require(moved.beside <= NOTHING, f"a token moves logits of the sequence beside it by {moved.beside:.1e}")
        require(moved.later > NOTHING, f"token {place} moves no logit of later ones: nothing passes between tokens")
    return f"tokens {', '.join(map(str, places))} of {length} changed"


@CRITERIA(5, "of two documents in a row the second does not see the first; or a ConfigError refuses documents")
def documents(session: Session) -> str:
    """The last token of the first document is changed."""
    places = [session.random.randrange(3, 12)]
    try:
        (moved,) = session.ask(1, trials.disturbed, session.flags, places, True)
    except Missed as error:
        return _refused(error)
    told = f"the last token of a document, {places[0]}, moves logits of the next document by {moved.later:.1e}"
    require(moved.later <= NOTHING, told)
    return f"two documents, the first of {places[0] + 1} tokens"


def _refused(error: Missed) -> str:
    """What a ConfigError says; any other error is raised."""
    if not isinstance(error.__cause__, ConfigError):
        raise error
    return f"refused: {error.__cause__.what}"


# ------------------------------------------------------------------------------------------------------- many ranks


def _compared(session: Session, flags: str, world: int = 2) -> str:
    what, where, fix = session.ask(world, trials.compared, f"{session.flags} {flags}")
    require(not fix, f"{what} ({where})" if where else what)
    return str(what)


@CRITERIA(
    10,
    "tp2, and tp2 with sequence parallelism: outputs of modules, losses, every gradient and their norm are those of "
    "one process, within 1e-7 in float64",
)
def tensor_parallel(session: Session) -> str:
    """Two ranks that share each matrix."""
    _compared(session, TP2)
    return _compared(session, SP)


@CRITERIA(5, "pp2: the same")
def pipeline(session: Session) -> str:
    """A layer on each of two ranks."""
    return _compared(session, "--pipeline-model-parallel-size 2")


@CRITERIA(5, "cp2: the same, or a ConfigError refuses context parallelism")
def context_parallel(session: Session) -> str:
    """Half of each sequence on each of two ranks."""
    try:
        return _compared(session, "--context-parallel-size 2")
    except Missed as error:
        return _refused(error)


@CRITERIA(
    5,
    f"with all layers recomputed every gradient is that without, within {AGAIN:g} in float64; over tp2 what is "
    "computed again is the same to the bit",
)
def recompute(session: Session) -> str:
    """`--recompute-granularity full`."""
    found = session.ask(1, trials.recomputed, session.flags, FULL)
    name, off = max(found.items(), key=lambda item: item[1])
    require(off <= AGAIN, f"with recompute {name} is {off:.1e} away from without")
    return _compared(session, f"{SP} {FULL}")


@CRITERIA(
    10,
    "a checkpoint of one process, loaded with tp2 and saved again, is the same to the bit, Adam's moments too; "
    f"the next two steps of both are the same within {GOES_ON:g}",
)
def resharded(session: Session) -> str:
    """Four steps; two of them once more on two ranks."""
    one, two = session.scratch / "one", session.scratch / "two"
    flags = f"{session.flags} --train-iters 4 --lr 1e-2 --lr-decay-iters 4 --save-interval 2"
    went_on = session.ask(1, trials.trained, f"{flags} --save {one}")
    resumed = session.ask(2, trials.trained, f"{flags} {SP} --load {one} --ckpt-step 2 --save {two}", True)
    ours, theirs = (_tensors(root) for root in (one, two))
    different = sorted(ours.tensors.keys() ^ theirs.tensors.keys())
    different = [name for name in different if not name.startswith("rng.")]
    require(not different, f"one of the two checkpoints has no {', '.join(different[:3])}")
    names = [name for name in ours.tensors if not name.startswith("rng.")]
    for name in names:
        a, b = ours.read(name), theirs.read(name)
        require(a.shape == b.shape and bool((a == b).all()), f"{name} is another tensor after tp1 -> tp2")
    for step, (a, b) in enumerate(zip(went_on.steps[2:], resumed.steps, strict=True), 3):
        told = f"in step {step} one process has loss and norm {a[0]:.6g}, {a[1]:.6g}, tp2 goes on with {b[0]:.6g}, "
        off = max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))
        require(off <= GOES_ON, told + f"{b[1]:.6g}")
    return f"{len(names)} tensors are the same, and two steps"


def _tensors(root: Path) -> CheckpointFiles:
    return CheckpointFiles(folder_of(root, 2), read_manifest(root, 2))


# ---------------------------------------------------------------------------------------------------- generation


@CRITERIA(
    10,
    f"logits from kept states are those of the whole sequence, within {STATES:g} in float64, on one rank and over tp2, "
    "whatever earlier sequences have left; greedy answers of an engine are those of whole passes",
)
def generation(session: Session) -> str:
    """Pieces of different lengths, several sequences at once, more prompts than places."""
    prompts = [[session.random.randrange(40) for _ in range(length)] for length in (5, 1, 9, 3, 7)]
    for ranks, flags in ((1, session.flags), (2, f"{session.flags} {TP2}")):
        found = session.ask(ranks, trials.generated, flags, prompts)
        where = "" if ranks == 1 else " over tp2"
        require(found.off <= STATES, f"logits from kept states are {found.off:.1e} away{where}")
        told = f"what an earlier sequence has left is seen: logits are {found.after_others:.1e} away{where}"
        require(found.after_others <= STATES, told)
        for prompt, words, wanted in zip(prompts, found.words, found.wanted, strict=False):
            told = f"after {prompt} an engine says {words}, whole passes {wanted}"
            require(words == wanted, told)
    return f"{len(prompts)} answers, and logits of {sum(PIECES)} tokens in {len(PIECES)} pieces"


# ------------------------------------------------------------------------------------------------------ a run


@CRITERIA(
    5,
    f"the memory that is predicted of a run is what is counted, within {MEMORY:.0%} at its peak and "
    f"{COMES_AND_GOES:.0%} of what comes and goes, in one process and with tp2; nothing is left out",
)
def planned(session: Session) -> str:
    """The third step of a run is watched; models are wider, so that a tensor is more than a number."""
    flags = f"{session.flags} --hidden-size 96 --seq-length 64 --ffn-hidden-size 192 --train-iters 3 --lr 1e-3"
    flags += " --log-memory-interval 3"
    shown = []
    for ranks, more in ((1, ""), (2, SP)):
        for who, lacks, told, counted, between, held in session.ask(ranks, trials.trained, f"{flags} {more}").memory:
            require(not lacks, f"{who.removesuffix(' predicted')}: {lacks}")
            off, moving = abs(told - counted) / counted, abs((told - between) - (counted - held)) / (counted - held)
            text = f"{told:,} bytes are predicted, {counted:,} counted{' with tp2' if ranks > 1 else ''}"
            require(off <= MEMORY and moving <= COMES_AND_GOES, f"{text}; of what comes and goes {moving:.0%} off")
            shown.append(off)
    return f"{len(shown)} ranks, at most {max(shown):.1%} off"


@CRITERIA(
    5,
    f"after {STEPS} steps of AdamW the loss is below {LEARNED:g}, where a model that knows no earlier tokens cannot be "
    f"below {WITHOUT_MEMORY:.2f}",
)
def learns(session: Session) -> str:
    """Each sequence's first token says which of four rules it follows."""
    losses = session.ask(1, trials.learned, f"{session.flags} --init-method-std 0.05 --seq-length 32", STEPS, RATE)
    end = sum(losses[-10:]) / 10
    require(end < LEARNED, f"the loss goes from {losses[0]:.2f} to {end:.2f}")
    return f"the loss goes from {losses[0]:.2f} to {end:.2f}"


# ------------------------------------------------------------------------------------------------------- tests


@CRITERIA(
    15,
    f"{MISTAKES} mistakes are planted in {FILE} that change what it computes, one at a time ({FEWEST} where it has no "
    f"more places): your tests notice {NOTICED:.0%} of them, pass for {FILE} itself, and for one that says the same in "
    "other words",
)
def mistakes(session: Session) -> str:
    """The hand-in's tests on variants of it."""
    source = (session.folder / FILE).read_text()
    _passes(session, session.folder, "your own tests do not pass")
    _passes(session, _variant(session, "same", in_other_words(source)), f"they fail for a {FILE} that does the same")
    found = _mistakes(session, source)
    require(len(found) >= FEWEST, f"{FILE} computes so little that only {len(found)} mistakes can be planted")
    missed = [one for number, one in enumerate(found) if not _noticed(session, number, one)]
    told = f"{len(found) - len(missed)} of {len(found)} mistakes are noticed"
    told += "".join(f"; not: line {one.line}, {one.what}" for one in missed)
    require(len(missed) <= (1 - NOTICED) * len(found), told)
    return told


def _variant(session: Session, name: str, source: str) -> Path:
    target = session.scratch / f"variant-{name}"
    return target if target.is_dir() else with_source(session.folder, target, source)


def _passes(session: Session, folder: Path, otherwise: str) -> None:
    status, said = session.ask(1, trials.tested, folder, folder=folder)
    require(status != 5, "there is no test")
    require(status == 0, f"{otherwise}: {' '.join(said.split())[-300:]}")


def _mistakes(session: Session, source: str) -> list[Planted]:
    """Mistakes that build, run in one process, and compute something else."""
    print_of = session.ask(2, trials.fingerprint, session.flags, SP)
    found: list[Planted] = []
    for number, one in enumerate(planted(source, session.random)):
        if len(found) == MISTAKES or number == TRIED:
            break
        folder = _variant(session, f"tried-{number}", one.source)
        try:
            now = session.ask(2, trials.fingerprint, session.flags, SP, folder=folder)
        except Missed:  # it does not build, or never ends
            continue
        if not isinstance(now["forward"], str) and changed(print_of, now):
            found.append(one)
    return found


def _noticed(session: Session, number: int, one: Planted) -> bool:
    folder = _variant(session, f"mistake-{number}", one.source)
    try:
        return session.ask(1, trials.tested, folder, folder=folder)[0] != 0
    except Missed:  # no end: somebody notices that
        return True
