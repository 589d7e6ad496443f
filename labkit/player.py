"""The learner's side of a check: import the code, call it, and say in plain data what came out.

Runs in a process of the nursery (`fresh`), which knows neither the expected answers nor the module that holds them. The
job, by rank::

    sources    {name: text} of all saved exercises, importable here as `exercises.<name>`
    exercise   which of them is asked
    function   the function in it
    drive      source of a function `drive(exercise, **inputs)` that calls it in its own way, or None
    trials     keyword arguments of each call, one after the other; on ranks there is one
    strided    of each trial: hand tensors over as views that are not contiguous
    world      number of ranks, whose default process group is gloo's (`process_group`), or 0 for a plain call in one
               process
    members    ranks that call; the others only stand beside
    groups     what they get beside the inputs: [name, whether it is an `Axis`, lists of places in members]
    seconds    that a call may take
    hidden     folder of the checks, closed to this process
    without    modules of the package that it may not import
    prepared   for the lab's tools (`labkit.tools`)
    late       of each trial the numbers that the drive gets one by one, or []

It returns `{"trials": [{"value": ..., "evidence": ..., "changed": inputs that are not what they were}, ...], "groups":
how many were made}`, or fails
with `{"todo": exercise}` where a stub raised NotImplementedError, or `{"error": text, "line": n, "peer": whether it is
only another rank's failure seen from here, "unread": whether the cell cannot be read or lacks the function}`, and the
trials before it.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import hashlib
import random
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit import closing, plain, process_group, sandbox, tools
from labkit.evidence import OpRecorder
from labkit.exercises import GIVEN
from labkit.nursery import Failed
from minimegatron.comm.axis import Axis
from minimegatron.errors import MinimegatronError
from minimegatron.launch.error_report import is_consequence

STUB = "your code here"
_NO_FUNCTION = re.compile(r"module '(exercises\.\w+)' has no attribute '(\w+)'")
# Of gloo's errors: a place in torch's sources, in some with the time of day; a port that is another one in each run;
# advice.
_NOISE = re.compile(
    r"^\[(enforce fail at )?\S+\.cc:\d+\] |^(\[rank\d+\]:)?\[[A-Z]\d+ [\d:.]+ \S+\.cpp:\d+\] "
    r"| \[127\.0\.0\.1\]:\d+|\.? This is typically caused by .*"
)
_BESIDE = {  # words of an error, and what a learner does not know of the place where it was raised
    "got an unexpected keyword argument": "the check calls by name: keep the names of the parameters",
    "Default process group has not been initialized": "there is no process group yet where a cell is imported: create "
    "groups inside the function",
}


def rehearse() -> None:
    """Before any fork, have torch load what it imports at its first operation under a dispatch mode (1 s).

    It also reads, from files that no rank sees, which instructions the processor has, and computes with them.
    """
    torch.backends.cpu.get_cpu_capability()
    with OpRecorder():
        torch.ones(1)
    closing.remember()


def play(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run the trials of a job on this rank.

    Raises:
        Failed: with what the learner's code raised, as plain data.
    """
    _enter(job)
    done: list[dict[str, Any]] = []
    try:
        before = [digests(inputs) for inputs in job["trials"]]
        if not job["world"]:
            exercise = _import(job)
            for number, was in enumerate(before):
                done.append(_call(exercise, job, number, {}, was, 0))
            return {"trials": done}
        process_group.connect(sandbox.shared_folder(), rank, world, job["seconds"])
        given = groups_of(job, rank)
        dist.barrier()  # one that fails at once would leave while others still connect, and they would fail of that
        for number, was in enumerate(before):
            with process_group.without_a_group():
                exercise = _import(job)
            done.append(_call(exercise, job, number, given, was, job["members"].index(rank)))
        return {"trials": done, "groups": process_group.groups_made()}
    except NotImplementedError as error:
        todo = {"todo": _exercise_of(error) or job["exercise"]}
        said = todo if STUB in str(error) else _error(error, job["exercise"])
        raise Failed({**said, "trials": done}) from None
    except BaseException as error:
        raise Failed({**_error(error, job["exercise"]), "trials": done}) from None


class _Endless(Exception):
    """A variant has used all the processor that it may."""


def vary(rank: int, world: int, job: dict[str, Any]) -> Iterator[Any]:
    """The values of each of the job's `variants` of the exercise on the trials, or the error that one raises.

    A variant on ranks gets a default process group of its own, which stays until all ranks have come to the next one: a
    rank that is done early ends no other. One that hangs is the caller's affair, which sees whether any rank still
    computes; one that computes for ever ends after `patience` seconds of processor.
    """

    def endless(*_: object) -> None:
        raise _Endless

    _enter(job)
    signal.signal(signal.SIGPROF, endless)
    for number, text in enumerate(job["variants"]):
        _install({job["exercise"]: text})
        said: Any = None
        try:
            given: dict[str, Any] = {}
            if job["world"]:
                (place := sandbox.shared_folder() / str(number)).mkdir(exist_ok=True)
                process_group.connect(place, rank, world, job["seconds"])
                given = groups_of(job, rank)
                dist.barrier()  # as in `play`
            signal.setitimer(signal.ITIMER_PROF, job["patience"])
            said = [_value(job, at, given) for at in range(len(job["trials"]))]
        except _Endless:
            pass
        except Exception as error:
            failed = _error(error, job["exercise"])
            said = {"error": failed["error"], "peer": failed["peer"]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if not isinstance(said, list) and dist.is_initialized():
            dist.destroy_process_group()  # whoever waits for this rank gets an error
        yield said


def _value(job: dict[str, Any], number: int, groups: dict[str, Any]) -> Any:
    for name in [one for one in sys.modules if one.startswith("exercises.")]:
        del sys.modules[name]
    inputs = copy.deepcopy(job["trials"][number])
    process_group.LOG.begin(late=job["late"][number])
    mine = strided(inputs) if job["strided"][number] else inputs
    said = plain.settled(_drive(_import(job), job, {**mine, **groups}))
    tools.take_notes()
    return plain.loads(plain.dumps(said))


def _enter(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    sandbox.enter(Path.cwd(), hidden=(Path(job["hidden"]), *closing.files_of(job["without"])), ranks=job["world"] > 0)
    closing.close(job["without"])
    _install(job["sources"])
    tools.prepared = job["prepared"]


def _import(job: dict[str, Any]) -> Any:
    return __import__(f"exercises.{job['exercise']}", fromlist=["_"])


def _call(
    exercise: Any, job: dict[str, Any], number: int, groups: dict[str, Any], was: dict[str, str], place: int
) -> dict[str, Any]:
    """One call, by the rank at `place` of the members: the answer, what happened, and which inputs it changed."""
    torch.default_generator.manual_seed(place)  # `torch.manual_seed` looks at every kind of device, for 3 ms
    random.seed(place)
    inputs = job["trials"][number]
    mine = strided(inputs) if job["strided"][number] else inputs
    with OpRecorder(place) as recorder:
        recorder.give(mine)
        process_group.LOG.begin(lambda: recorder.ops, job["late"][number])
        value = plain.settled(_drive(exercise, job, {**mine, **groups}))  # iterators run here, where they are seen
    evidence, log = recorder.evidence(recorder.alive(value)), process_group.LOG
    evidence = dataclasses.replace(evidence, notes=tools.take_notes(), calls=())
    if job["world"]:
        evidence = evidence.with_calls(log.placed(job["members"]), log.marks)
    now = digests(mine)
    changed = [name for name in was if now[name] != was[name]]
    return {"value": plain.loads(plain.dumps(value)), "changed": changed, "evidence": evidence.to_plain()}


def _install(sources: dict[str, str]) -> None:
    folder = Path("exercises")
    folder.mkdir(exist_ok=True)
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(text)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _drive(exercise: Any, job: dict[str, Any], inputs: dict[str, Any]) -> Any:
    if job["drive"] is None:
        return getattr(exercise, job["function"])(**inputs)
    namespace: dict[str, Any] = {name: getattr(process_group, name) for name in GIVEN}
    # Its annotations stay unevaluated: compile inherits the future import of this file.
    exec(compile(job["drive"], "<how the check calls it>", "exec"), namespace)  # noqa: S102  in a process made for it
    drive = next(value for name, value in namespace.items() if name not in ("__builtins__", *GIVEN))
    return drive(exercise, **inputs)


def _exercise_of(error: BaseException) -> str | None:
    """The exercise in whose file the error was raised."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.parent.name == "exercises":
            return path.stem
    return None


def groups_of(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """The groups for the function, by the name of the input; {} on a rank that only stands beside. Made by all
    ranks."""
    members, world = job["members"], job["world"]
    patience = datetime.timedelta(seconds=job["seconds"] + 10)
    given: dict[str, Any] = {}
    for name, as_axis, parts in job["groups"]:
        for part in parts:
            ranks = [members[place] for place in part]
            alone = as_axis and len(ranks) == 1 and len(parts) > 1  # as the package's axes of one rank: no group
            whole = ranks == list(range(world))
            group = None if alone else dist.group.WORLD if whole else dist.new_group(ranks, timeout=patience)
            if rank in ranks:
                given[name] = Axis(name, tuple(ranks), ranks.index(rank), group) if as_axis else group
    return given


def strided(value: Any) -> Any:
    """The same values in views that are not contiguous: of a transposed buffer, or of every second number of one."""
    if isinstance(value, list | tuple):
        return type(value)(strided(item) for item in value)
    if isinstance(value, dict):
        return {key: strided(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or value.numel() < 2:
        return value
    if value.ndim > 1:
        view = value.transpose(0, -1).contiguous().transpose(0, -1)
        if not view.is_contiguous():
            return view
    view = value.new_zeros((*value.shape, 2))[..., 0]
    return view.copy_(value)


def digests(inputs: Mapping[str, Any]) -> dict[str, str]:
    """{input: digest of its values}, to be compared before and after a call."""
    return {name: hashlib.sha256(plain.dumps(value).encode()).hexdigest() for name, value in inputs.items()}


def _error(error: BaseException, name: str) -> dict[str, Any]:
    text = error.what if isinstance(error, MinimegatronError) else str(error)
    text = error.msg if isinstance(error, SyntaxError) else text  # without the file and the line, which come below
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).name == f"{name}.py":
            line = frame.lineno
    if isinstance(error, SyntaxError):
        line = error.lineno
    line = getattr(error, "line", 0) or line  # an error of a lab's tool may know it better
    first = _NOISE.sub("", text.strip().splitlines()[0][:400]) if text.strip() else ""
    if isinstance(error, AttributeError) and (missing := _NO_FUNCTION.fullmatch(first)):
        return {"error": _not_defined(*missing.groups()), "line": None, "peer": False, "unread": True}
    beside = next((said for words, said in _BESIDE.items() if words in first), "")
    first = f"{first} ({beside})" if beside else first
    if type(error) is NameError:  # the notebook may have the name
        first += ": the cell of an exercise sees only what it imports or defines itself"
    return {"error": f"{type(error).__name__}: {first}" if first else type(error).__name__,
            "line": line, "peer": is_consequence(error), "unread": isinstance(error, SyntaxError)}  # fmt: skip


def _not_defined(module: str, wanted: str) -> str:
    """A message about what the cell defines in place of what the check calls."""
    there = [name for name, value in vars(sys.modules[module]).items() if getattr(value, "__module__", "") == module]
    return f"the cell defines {', '.join(f'`{name}`' for name in there) or 'nothing'}, not `{wanted}`"
