"""When a rank's flight record leaves it: at a deadline, at an error, at SIGUSR2.

| moment                                      | this rank                                  | the others                |
|---------------------------------------------|--------------------------------------------|---------------------------|
| a communication raised or ran out of time   | asks all, and prints the first mismatch    | hand in their records     |
| any other error                             | writes its record                          | write theirs, at the end  |
| SIGUSR2 to any rank                         | asks all, prints the mismatch, and goes on | hand in their records     |

The watch of a rank hands in, so it may be blocked meanwhile.
A record goes through the store of the job (`launch/ledger`), so no folder has to be shared: the newest calls of each
rank, fewer where there are many ranks. The whole buffer goes to `--flight-recorder-dump-path`, or to the prefix in
`TORCH_FR_DUMP_TEMP_FILE`, if there is one. Of a rank that was killed or stopped on the same machine the last calls are
read from memory (`comm/last_calls`); one of another machine leaves none, and that is said.

| variable, torch's own            | means                                                          | default |
|----------------------------------|----------------------------------------------------------------|---------|
| `TORCH_FR_BUFFER_SIZE`           | calls that a rank keeps; 0 records nothing                     | 2000    |
| `TORCH_FR_DUMP_TEMP_FILE`        | prefix of the files; the rank is appended                      | none    |

They win over the flags, as in Megatron-LM. `launch/flight_dump` has what is written, `launch/mismatch` what is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from minimegatron.comm import flight_recorder
from minimegatron.comm.flight_recorder import FlightRecorder
from minimegatron.comm.last_calls import SLOTS, Page
from minimegatron.errors import ConfigError
from minimegatron.launch import flight_dump
from minimegatron.launch.flight_calls import Records
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.mismatch import Finding, first_mismatch

SIGNAL = signal.SIGUSR2
HANG = "hang"  # number of the request of a rank that fails
BUFFER, SENT, SENT_BY_ALL = 2000, 500, 20_000  # calls: kept; sent by a rank at most; sent by all ranks
SECONDS = 3.0  # for the records of others


class FlightRecords:
    """The recorder of this rank, and where its records go.

    Args:
        recorder: the recorder.
        ledger: of this rank.
        prefix: of the files, `FOLDER/_dump_`; None writes none.
        seconds: how long this rank waits for others.
        clock_offset_ns: of this machine's clock.

    Attributes:
        pages: the last calls of the other ranks of this machine.
        ended: ranks that have ended, and hand in nothing.
    """

    def __init__(
        self, recorder: FlightRecorder, ledger: Ledger, prefix: Path | None, seconds: float, clock_offset_ns: int = 0
    ) -> None:
        self.recorder, self.ledger, self.prefix, self.seconds = recorder, ledger, prefix, seconds
        self.clock_offset_ns = clock_offset_ns
        self.ended = set[int]()
        self.pages: dict[int, Page] = {}
        self._seen = ledger.dumps()
        self._handed_in = set[str]()
        self._lock = threading.Lock()

    def hand_in(self, number: str, reason: str) -> None:
        """Write this rank's record to its file and into the store; a second time for one request is no error."""
        with self._lock:
            if number in self._handed_in:
                return
            self._handed_in.add(number)
        self.write(reason)
        last = max(20, min(SENT, SENT_BY_ALL // self.ledger.world))
        self.ledger.record(number, json.dumps(self._dump(reason, last=last, frames=False)))

    def write(self, reason: str) -> None:
        """Write this rank's whole record to its files, if there are to be any. A full disk is no reason to fail."""
        if self.prefix is not None:
            try:
                flight_dump.write(self._dump(reason), self.prefix)
            except OSError as error:
                os.write(2, f"rank {self.ledger.rank} cannot write its flight record: {error}\n".encode())

    def finding(self, number: str, reason: str) -> Finding:
        """The first mismatch, from the records of all ranks that hand in theirs."""
        self.hand_in(number, reason)
        world = self.ledger.world
        texts = self.ledger.records(number, [r for r in range(world) if r not in self.ended], SECONDS)
        dumps = {rank: json.loads(text) for rank, text in texts.items()}
        for rank in self.pages.keys() - dumps.keys():
            dumps[rank] = flight_dump.of_page(self.pages[rank], rank, world, "it did not answer")
            if self.prefix is not None and not Path(f"{self.prefix}{rank}").exists():
                with contextlib.suppress(OSError):
                    flight_dump.write(dumps[rank], self.prefix)
        return first_mismatch(Records(dumps, world))

    def finding_at_once(self) -> Finding:
        """The first mismatch in this rank's record and the last calls of the other ranks of this machine; nobody is
        asked, because a launcher ends all ranks soon after the first has died."""
        world, own = self.ledger.world, self._dump("a rank has died", last=2 * SLOTS, frames=False)
        dumps = {r: flight_dump.of_page(page, r, world, "a rank has died") for r, page in self.pages.items()}
        return first_mismatch(Records(dumps | {self.ledger.rank: own}, world))

    def open_pages(self, ranks: Iterable[int]) -> None:
        """Map the last calls of other ranks of this machine, which are about to write where these are.

        Raises:
            DistError: one does not, within the deadline of the store.
        """
        for rank in ranks if self.recorder.last is not None else ():
            with contextlib.suppress(OSError, ValueError):  # it has ended already
                self.pages[rank] = Page(self.ledger.store.get(f"page/{rank}").decode())

    def asked(self) -> None:
        """Hand in a record for each request that has come since; called by the watch of the rank."""
        if (number := self.ledger.dumps()) > self._seen:
            self._seen = number
            self.hand_in(str(number), f"{SIGNAL.name} on some rank")

    def on_signal(self) -> str:
        """Ask every rank for its record; returns the line to print."""
        self._seen = number = self.ledger.dumps(1)
        return self.said(self.finding(str(number), f"{SIGNAL.name} on rank {self.ledger.rank}"))

    def said(self, finding: Finding) -> str:
        """The line about a finding, and where the files are."""
        line = f"first mismatch: {finding.text}" if finding else f"flight recorder: {finding.text}"
        if self.prefix is None:
            return line
        return f"{line}\nrecords of the ranks: minimegatron flight-recorder {self.prefix.parent}"

    def _dump(self, reason: str, last: int | None = None, frames: bool = True) -> dict:
        return flight_dump.dump(
            self.recorder, self.ledger.rank, self.ledger.world, reason, timeout_seconds=self.seconds,
            clock_offset_ns=self.clock_offset_ns, last=last, frames=frames,
        )  # fmt: skip


class _Running:
    """Those of this process; and what `configure` was told."""

    records: FlightRecords | None = None
    size, folder = BUFFER, None  # type: int, str | None


def configure(size: int, folder: str | None) -> None:
    """How many calls are kept and where dumps go, unless the environment says otherwise; before `start`."""
    _Running.size, _Running.folder = size, folder


def settings(environ: Mapping[str, str] = os.environ) -> tuple[int, Path | None]:
    """The size of the buffer and the prefix of the files.

    Raises:
        ConfigError: the variable is no number.
    """
    prefix = Path(_Running.folder, flight_dump.PICKLE) if _Running.folder else None
    text = environ.get("TORCH_FR_BUFFER_SIZE", str(_Running.size))
    if not text.isdecimal():
        raise ConfigError(f"TORCH_FR_BUFFER_SIZE is {text!r}", fix="a number of calls; 0 records nothing")
    if named := environ.get("TORCH_FR_DUMP_TEMP_FILE"):
        prefix = Path(named) / flight_dump.PICKLE if os.path.isdir(named) else Path(named)
    return int(text), prefix


def start(
    ledger: Ledger, seconds: float, clock_offset_ns: int = 0, siblings: Iterable[int] = ()
) -> FlightRecords | None:
    """Record the communications of this rank from now on, and listen to `SIGNAL`; all ranks call it.

    Args:
        ledger: of this rank.
        seconds: how long it waits for others.
        clock_offset_ns: of this machine's clock.
        siblings: the other ranks of this machine.

    Raises:
        ConfigError: a variable is no number.
    """
    size, prefix = settings()
    recorder = flight_recorder.start(size)
    _Running.records = None
    where = recorder.last.where if recorder is not None and recorder.last is not None else ""
    ledger.store.set(f"page/{ledger.rank}", where)  # of a rank that has none, too: others ask for it
    if recorder is not None:
        _Running.records = FlightRecords(recorder, ledger, prefix, seconds, clock_offset_ns)
        _Running.records.open_pages(siblings)
        # The watch hears of it, whatever the main thread is doing; a program's own handler stays.
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(SIGNAL) is signal.SIG_DFL:
                signal.signal(SIGNAL, lambda *_: None)
    return _Running.records


def stop() -> None:
    """Record no longer."""
    flight_recorder.start(0)
    _Running.records = None


def running() -> FlightRecords | None:
    """Those of this process, if it records."""
    return _Running.records
