"""A communication that a rank has started: the judge's broker has its result until the rank waits for it."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

from labkit.transport_link import Link

Tensor = torch.Tensor
_LONG = datetime.timedelta(minutes=5)  # a timeout of so much is none


class BrokerWork(Work):
    """A started communication.

    Args:
        number: number of the message that started it.
        outputs: tensors for the result.
        put: copies the tensors of the answer there.
    """

    def __init__(self, number: int, outputs: list[Tensor], put: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._number, self._outputs, self._put = number, outputs, put
        self._lock = threading.Lock()
        self._done, self._collecting = False, False
        self._error: RuntimeError | None = None
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        while Link.spoiled:
            Link.spoiled.pop().data.fill_(torch.nan)  # type: ignore[attr-defined]
        if self._collecting:
            Link.tell("wait", work=self._number, note=True)
        short = timeout is not None and datetime.timedelta(0) < timeout < _LONG
        return self._collect(seconds=timeout.total_seconds() if timeout is not None and short else None)

    def _collect(self, do: str = "wait", **facts: Any) -> bool:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._done:
                return True
            try:
                head, tensors = Link.ask(do, work=self._number, **facts)
            except RuntimeError as error:
                if "timed out after" not in str(error):
                    self._error = error
                raise
            if not head.get("ready", True):
                return False
            with _disable_current_modes():
                self._put(tensors)
            self._source, self._done = head.get("source", -1), True
            return True

    def is_completed(self) -> bool:
        try:
            return self._collect("test")
        except RuntimeError:
            return True

    def is_success(self) -> bool:
        return self._error is None

    def exception(self) -> RuntimeError | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()  # no deadline: the judge's

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that a thread completes; `wait` of the future counts as a wait for this."""
        if self._future is None:
            self._future = _Future()
            self._future.work, self._collecting = self, True
            threading.Thread(target=self._fulfil, args=(self._future,), daemon=True).start()
        return self._future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._collect(quiet=True)
            future.set_result(self._outputs)
        except RuntimeError as error:
            future.set_exception(error)


class _Future(torch.futures.Future):  # type: ignore[misc, unused-ignore]
    work: BrokerWork | None = None

    def wait(self) -> Any:
        if self.work is not None:
            Link.tell("wait", work=self.work._number, note=True)
        return super().wait()  # no deadline: the judge's
