"""One traceback for a whole job, from the rank that failed first.

The problem in a sentence: when rank 1 raises, ranks 0, 2 and 3 raise as well, half a millisecond later and with longer
tracebacks, because their connections broke.

An error is a *consequence* if it only says that talking to another rank failed (`is_consequence`), or that another rank
has failed and told this one (`comm/agree`). A rank that fails writes the cause into the ledger, and the first to write
stands. Then:

| error of this rank                           | what it prints                              | exit status       |
|----------------------------------------------|---------------------------------------------|-------------------|
| the cause                                    | the traceback; of our own errors their text | its class's, or 5 |
| a consequence                                | "rank 0 ends because rank 1 failed: ...",   | 5                 |
|                                              | once a machine                              |                   |
| a wait that ran out, with no known cause     | an error naming the missing ranks and lines | 7                 |
| the same as the cause (a config error)       | nothing                                     | its class's, or 5 |
| another one                                  | one line                                    | 5                 |
| Ctrl-C                                       | nothing                                     | 130               |

Where a communication has raised or run out of time, the line about the first mismatch of all ranks follows
(`launch/flight_records`).

The rank that prints the cause waits a moment for others with the same error; one that fails because of another stays
for up to 5 s, so that the launcher sees the first one end first, and names it. Each leaves its error in the file in
which torch's launcher looks for it (`torch.distributed.elastic...record` writes the same).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from minimegatron.comm.async_ops import waited_for
from minimegatron.errors import DeadlineError, MinimegatronError, RankError, named, ranges
from minimegatron.launch import flight_records
from minimegatron.launch.ledger import INTERRUPTED, Ledger, Position
from minimegatron.launch.procs import AGENT
from minimegatron.launch.watch import Overdue, Watch, position

CAUSE_SECONDS = 3.0  # from a broken connection to the note of the rank that broke it
LINGER_SECONDS = 5.0
SAME_SECONDS = 0.5  # from one rank's mistake to the same mistake on another; before `init`, START_SECONDS
START_SECONDS = 3.0
# gloo, NCCL and torch's stores raise plain RuntimeErrors; their words are all there is to go by.
_LOST = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|caused pair closure|remote process (exited|has)"
    r"|NCCL communicator was aborted|failed to recv, got 0 bytes|Could not connect to|TCPStore|recvValue failed"
    r"|ranks? [\d, -]+ (has|have) ended"
)
_TIMED_OUT = re.compile(
    r"Timed out waiting|[Ww]ait timeout|Socket Timeout|timed out after \d+ *ms|collective operation timeout"
)


def is_consequence(error: BaseException | str) -> bool:
    """Whether an error (or its text) only says that talking to another rank failed; then that rank has the cause."""
    if isinstance(error, BaseException) and not isinstance(error, RuntimeError | ConnectionError):
        return False
    return bool(_LOST.search(str(error))) or timed_out(error)


def timed_out(error: BaseException | str) -> bool:
    """Whether the error says that another rank did not answer in time (rather than that its connection broke)."""
    return bool(_TIMED_OUT.search(str(error)))


def fail(error: BaseException, ledger: Ledger | None, watch: Watch | None, seconds: float) -> int:
    """Print `error` if it is the first of the job, mention it otherwise.

    Args:
        ledger, watch: those of this rank, as far as it has them.
        seconds: how long this rank waits for others.

    Returns:
        The exit status of this rank, which should end now.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing left to save
    if (records := flight_records.running()) is not None and not isinstance(error, KeyboardInterrupt):
        records.write(f"{type(error).__name__}: {error}"[:500])
    if ledger is not None:
        try:
            return _fail_with(error, ledger, watch, seconds)
        except dist.DistError:  # the store, hence the launcher, is gone; then every rank prints its own error
            pass
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    _record(error)
    _write(_described(error))
    return _status(error)


def _fail_with(error: BaseException, ledger: Ledger, watch: Watch | None, seconds: float) -> int:
    if isinstance(error, KeyboardInterrupt):
        ledger.claim(ledger.rank, INTERRUPTED)
        return 128 + signal.SIGINT
    silent: list[int] = []
    mismatch, in_communication = "", waited_for(error) is not None or isinstance(error, Overdue)
    consequence = is_consequence(error) or getattr(error, "of_another", False)
    if consequence and ledger.cause() is None:
        if timed_out(error):
            error, silent = _missing(error, ledger, seconds)
        else:
            error = _departed(ledger, watch) or error
    if in_communication and ledger.cause() is None:
        mismatch = _first_mismatch(ledger, error)
    what = f"failed: {type(error).__name__}: {error}"
    cause = ledger.claim(ledger.rank, what)
    if cause.author == cause.rank == ledger.rank:
        _record(error)
        _write(_described(error) + mismatch)
        if not consequence:
            with contextlib.suppress(DeadlineError):
                ledger.meet("failure", SAME_SECONDS if watch is not None else START_SECONDS)
        if watch is not None:
            watch.end(silent)
        return _status(error)
    if cause.text == INTERRUPTED:
        return 128 + signal.SIGINT
    if cause.text == what:
        _record(error)
        ledger.come("failure")
    elif not consequence:
        _write(f"rank {ledger.rank} failed too: {type(error).__name__}: {error}\n")
    elif AGENT not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        _write(f"rank {ledger.rank} ends because rank {cause.rank} {cause.text.splitlines()[0]}\n")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(LINGER_SECONDS)
    return _status(error) if cause.text == what else RankError.exit_code


def _first_mismatch(ledger: Ledger, error: BaseException) -> str:
    """A line about what the flight recorders of all ranks show; "" where nothing is recorded."""
    if (records := flight_records.running()) is None:
        return ""
    ledger.ask()
    return records.said(records.finding(flight_records.HANG, f"{type(error).__name__}: {error}"[:500])) + "\n"


def _record(error: BaseException) -> None:
    """Write the error for the launcher, in the file and the format of torch's `record`.

    Plain torchrun prints `py_callstack` at the end of its own report: the error once more, and not its traceback.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        trace, text = "".join(traceback.format_exception(error)), f"{type(error).__name__}: {error}"
        again = text if isinstance(error, MinimegatronError) else f"{text} (its traceback is above)"
        stack = trace if AGENT in os.environ else again
        extra = {"py_callstack": stack, "timestamp": str(int(time.time())), "traceback": trace}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _described(error: BaseException) -> str:
    rank = f"rank {os.environ['RANK']} failed: " if "RANK" in os.environ else ""
    if isinstance(error, MinimegatronError):
        return f"{rank}{type(error).__name__}: {error}\n"
    return rank + "".join(traceback.format_exception(error))


def _status(error: BaseException) -> int:
    return error.exit_code if isinstance(error, MinimegatronError) else RankError.exit_code


def _missing(error: BaseException, ledger: Ledger, seconds: float) -> tuple[BaseException, list[int]]:
    """Ask every rank where it is, after a collective ran out of time.

    Returns:
        (The error that names the missing ranks, the ranks that do not answer.)
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame if trace else None
    own = error.position if isinstance(error, Overdue) else position(frame, waited_for(error))
    ledger.answer(own)
    ledger.ask()
    ranks = own.ranks or tuple(range(ledger.world))
    positions = ledger.answers(range(ledger.world), CAUSE_SECONDS)
    late = [r for r in ranks if _elsewhere(positions.get(r), own)]
    behind = _behind(late, positions)
    silent = [r for r in [*late, *behind] if r not in positions]
    limit = re.search(r"(\d+) ?ms", str(error))
    seconds = int(limit[1]) / 1000 if limit else seconds
    call = f"{own.op or 'a communication'} over {own.axis or 'a group'} (ranks {ranges(ranks)})"
    who = f"{named(late)} did not come" if late else "all ranks came, but it did not end"
    who += f", which wait{'s'[: len(late) == 1]} for {named(behind)}" if behind else ""
    places = [
        f"rank {r} is at {positions[r].line}" if r in positions else f"rank {r} does not answer (stopped?)"
        for r in [*late, *behind]
    ]
    missing = DeadlineError(
        f"{call}: {who}, within {seconds:g} s" if behind else f"{call}: {who} within {seconds:g} s",
        where="; ".join([*places, f"rank {ledger.rank} waits at {own.line}"]),
        fix="every rank of a group must make the same calls; a longer wait is timeout_seconds",
    )
    return missing.with_traceback(error.__traceback__), silent


def _elsewhere(other: Position | None, own: Position) -> bool:
    """Whether a rank does not answer, or is not in the call `own`."""
    return other is None or (other.op, other.ranks) != (own.op, own.ranks)


def _behind(late: list[int], positions: dict[int, Position]) -> list[int]:
    """Ranks at the end of a chain, for which the late ranks wait themselves, as along a pipeline."""
    seen, front = set(late), set(late)
    while True:
        waited_for = {
            q for r in front if r in positions for q in positions[r].ranks if _elsewhere(positions.get(q), positions[r])
        }
        if not (further := waited_for - seen):
            return sorted(front.difference(late))
        seen, front = seen | further, further


def _departed(ledger: Ledger, watch: Watch | None) -> RankError | None:
    """Wait for the rank that broke a connection to write the cause; returns an error if it only ended early."""
    deadline = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < deadline and not ledger.cause():
        time.sleep(0.05)
    left = watch.left if watch is not None else set()
    if not left or ledger.cause():
        return None
    return RankError(
        f"{named(left)} left with exit status 0 while rank {ledger.rank} still waited for it",
        fix="end every rank with finish(), which waits for all",
    )


def say(line: str) -> None:
    """Print a line about another rank; under `minimegatron torchrun` the agent prints it, because it sees all ranks
    end."""
    if AGENT not in os.environ:
        _write(line + "\n")


def _write(text: str) -> None:
    """Write in one piece, so that the lines of several ranks do not mix."""
    sys.stderr.flush()
    os.write(2, text.encode(errors="replace"))
