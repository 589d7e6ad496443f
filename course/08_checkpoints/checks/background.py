"""Lab 08, an asynchronous save: snapshot first, written in the background, one at a time, no error lost.

The judge gives the saver a `write` that it holds, lets go, or lets fail, and changes the weights as the next step
would. What happens in which order is decided by events, not by a clock. Only "does it wait" needs a moment: a save that
should wait is given a quarter of a second in which it could return too early.

| asked                                   | how it is seen                                                      |
|-----------------------------------------|---------------------------------------------------------------------|
| what is written is the state at the save | weights change before any thread of the learner's may begin        |
| the run goes on meanwhile               | `write` is held until `save` has returned                           |
| one save at a time                      | the second `save` while the first `write` is held                   |
| an error is raised at the next step, once | `check`, `save` and `close` after a `write` that fails            |
| the last save is awaited                | `close` while `write` is held                                       |
| one staging copy                        | bytes of tensors that the run's thread has allocated; once more     |
|                                         | with a tied output layer, which is the embedding's memory           |
"""

from __future__ import annotations

from typing import Any

from labkit.checks import peak_at_most
from labkit.exercises import Answer, Case, Draw, Exercise

_ROOM = peak_at_most(  # `copy.deepcopy` makes a scalar of its own beside each tensor
    "one copy of the state, with a quarter to spare,",
    lambda inputs: sum(one.nbytes for one in inputs["state"].values()) * 5 // 4,
)


def _drive(exercise: Any, what: str, state: Any, bad: list[int], tied: str) -> Any:
    """Save steps 10, 20, ... as `what` says; what happened, in order: [event, step, ...]."""
    import threading
    import time

    happened: list[Any] = []
    held, started, run = threading.Event(), threading.Event(), threading.current_thread()
    real_run = threading.Thread.run

    def write(step: int, files: Any) -> None:
        happened.append(["write begins", step, threading.current_thread() is run])
        started.set()
        for _ in range(50 if threading.current_thread() is not run else 1):
            held.wait(0.02)
        happened.append(["write ends", step, {name: tensor.tolist() for name, tensor in files.items()}])
        if step in bad:
            raise OSError(f"no space left for step {step}")

    def later(thread: Any) -> None:
        """A thread begins when the next step has changed the weights."""
        gate.wait(1.0)
        real_run(thread)

    weights = list(state.values())
    if tied:
        state = {**state, tied: state["weight"].detach()}  # as `state_dict()` has it: another tensor, the same memory

    def train() -> None:
        for tensor in weights:
            tensor.mul_(2).add_(1)

    def call(name: str, *args: Any) -> bool:
        try:
            getattr(saver, name)(*args)
            happened.append([f"{name} returns", *[arg for arg in args if isinstance(arg, int)]])
            return False
        except NotImplementedError:
            raise
        except Exception as error:
            happened.append([f"{name} raises", f"{type(error).__name__}: {error}"])
            return True

    def let_go_after(seconds: float) -> None:
        threading.Timer(seconds, held.set).start()

    gate = threading.Event()
    saver = exercise.AsyncSaver(write)
    if what == "close at once":
        call("close")
        return happened
    if what == "snapshot":
        setattr(threading.Thread, "run", later)  # noqa: B010  mypy forbids the assignment
    try:
        call("save", 10, state)
        train()
    finally:
        setattr(threading.Thread, "run", real_run)  # noqa: B010
        gate.set()
    if what == "snapshot":
        held.set()
        call("close")
        for step in (20, 30):
            call("save", step, state)
            train()
        call("close")
    elif what == "two":
        started.wait(2.0)
        let_go_after(0.25)
        call("save", 20, state)
        train()
        call("close")
    elif what == "last":
        let_go_after(0.25)
        call("close")
    elif what == "step":  # an error shows at the first step after it
        call("check")
        held.set()
        for _ in range(400):
            if call("check"):
                break
            happened.pop()
            time.sleep(0.005)
        call("check")
        call("save", 20, state)
        train()
        call("close")
        call("close")
    else:  # `what` is the call at which it has to show
        held.set()
        call(*([what, 20, state] if what == "save" else [what]))
        call("close")
    return happened


# ------------------------------------------------------------------------------------------------------------ judges


def _at(happened: list[Any], event: str, step: int | None = None) -> int:
    """The place of an event; a large number if it has not happened."""
    return next((i for i, (name, *of) in enumerate(happened) if name == event and step in (None, *of[:1])), 10**6)


def _states(inputs: dict[str, Any]) -> dict[int, Any]:
    """{step: the state at its save}; each step after a save doubles the weights and adds 1."""
    found, state = {}, inputs["state"]
    if inputs["tied"]:
        state = {**state, inputs["tied"]: state["weight"]}
    for step in (10, 20, 30):
        found[step] = {name: tensor.tolist() for name, tensor in state.items()}
        state = {name: tensor * 2 + 1 for name, tensor in state.items()}
    return found


def _written(answer: Answer) -> str | None:
    """What was written, by whom, and when."""
    happened, states = answer.value, _states(answer.inputs)
    if raised := next((one for one in happened if one[0].endswith("raises")), None):
        return f"{raised[0]} {raised[1]}, though no write has failed"
    if answer.inputs["what"] == "close at once":
        return None if happened == [["close returns"]] else "close, without a save before it, does not return"
    if any(name == "write begins" and of[1] for name, *of in happened):
        return "the run itself writes: save is to return while the background writes"
    if _at(happened, "write ends", 10) < _at(happened, "save returns", 10):
        return "save returns only when step 10 is written: the run waits for the disk"
    for step in (10, 20, 30):
        ends = [of for name, *of in happened if name == "write ends" and of[0] == step]
        if _at(happened, "save returns", step) < 10**6 and len(ends) != 1:
            return (
                f"when close has returned, step {step} is written {len(ends)} times: close waits for the last save, "
                "and no save is left out"
            )
        if any(of[1] != states[step] for of in ends):
            later = next((other for other in states if ends[0][1] == states[other]), None)
            return f"what is written of step {step} is not its state: the weights of " + (
                f"step {later}" if later else "more than one step, or others"
            )
    return None


def _waits(answer: Answer) -> str | None:
    """Two saves: the second waits. The last: close waits."""
    happened = answer.value
    if (wrong := _written(answer)) or answer.inputs["what"] == "close at once":
        return wrong
    if answer.inputs["what"] == "two":
        ended = _at(happened, "write ends", 10)
        if _at(happened, "write begins", 20) < ended:
            return "step 20 is being written while step 10 still is"
        if _at(happened, "save returns", 20) < ended:
            return "the save of step 20 returns before step 10 is written: a slow disk lets copies pile up"
    last = 20 if answer.inputs["what"] == "two" else 10
    if _at(happened, "close returns") < _at(happened, "write ends", last):
        return f"close returns before step {last} is written: a program that ends here would lose it"
    return None


def _errors(answer: Answer) -> str | None:
    """The error of step 10 is raised once, at the right call."""
    happened, what = answer.value, answer.inputs["what"]
    raised = [(name, *of) for name, *of in happened if name.endswith("raises")]
    where = {"step": "check"}.get(what, what)
    if what == "step" and _at(happened, "check raises") < _at(happened, "write ends", 10):
        return "check raises before the write has ended"
    if what == "step" and _at(happened, "check returns") > _at(happened, "write ends", 10):
        return "check waits for the write: it is called at every step, and must not hold the run"
    if not raised:
        return f"the write of step 10 has failed, and {where} does not raise its error"
    if raised[0] != (f"{where} raises", "OSError: no space left for step 10"):
        return f"the write of step 10 has failed: {raised[0][0]} {raised[0][1]!r}, expected its OSError from {where}"
    if what == "save" and _at(happened, "write begins", 20) < 10**6:
        return "the save of step 20 has raised the error of step 10, and writes step 20 all the same"
    if len(raised) > 1:
        return f"the same error is raised twice: {where} raises, then {raised[1][0]}"
    if what == "step" and _at(happened, "write ends", 20) == 10**6:
        return "after an error was raised the next save writes nothing"
    return None


def _one_copy(answer: Answer) -> str | None:
    wrong = _ROOM(answer)
    if wrong and (tied := answer.inputs["tied"]):
        return f"{wrong}. `weight` and `{tied}` are one memory under two names, as an embedding and its output layer"
    return wrong


def _case(what: str, bad: tuple[int, ...] = (), tied: str = "") -> Any:
    def inputs(draw: Draw) -> dict[str, Any]:
        rows = draw.integer(2, 5)
        state = {"weight": draw.tensor(rows, 3), "bias": draw.tensor(rows), "exp_avg": draw.tensor(rows, 3)}
        return {"what": what, "state": state, "bad": list(bad), "tied": tied}

    return inputs


BACKGROUND = Exercise(
    "async_saver",
    function="AsyncSaver",
    drive=_drive,
    changes=["state"],
    cases=[
        Case("a save, a step that changes the weights, a close", _case("snapshot"), accept=[_written]),
        Case("the weights of a later step are not in the snapshot, wherever the background begins", _case("snapshot"),
             points=2, hidden=True, accept=[_written], draws=1),
        Case("a save before the last one is written waits; close waits for the last; without a save it does not",
             _case("two"), points=2, hidden=True, accept=[_waits], draws=1,
             fixed=[_case("last"), _case("close at once")]),
        Case("an error of the background is raised by the next check, save or close, and once", _case("step", (10,)),
             points=2, hidden=True, accept=[_errors], draws=1, fixed=[_case("save", (10,)), _case("close", (10,))]),
        Case("there is one staging copy, however many saves", _case("snapshot"), hidden=True,
             accept=[_written, _one_copy], draws=1, fixed=[_case("two"), _case("snapshot", tied="head")]),
    ],
    idea="What may the background read, if the next step changes every weight in place? And who looks at an error that "
    "nobody has caught?",
    hint="save: close() first (it joins the thread, and raises what it left); then copy_ each tensor into a buffer of "
    "your own, made with empty_like at the first save, one for all names with the same data_ptr(); then start a Thread "
    "that calls write(step, buffers) and keeps an exception in self.error. check: take self.error out, and raise it if "
    "there is one.",
)  # fmt: skip
