"""torch's key-value store, in the broker, for ranks of a check before they have a process group.

`Keys` is the judge's side, `BrokerStore` the learner's. A `get` or `wait` for a missing key is a wait like
any other (`transport_waits`): it ends when the key is set, or when no rank is left that could set it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Store

from labkit.channel import Line
from labkit.transport_waits import Thing
from minimegatron.errors import DataError

_MAX_BYTES = 64 << 20
_MAX_NAME = 1000


class Keys:
    """Keys and values of all ranks of a check."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._values, self._waiting = ranks, dict[str, bytes](), list[tuple[Thing, list[str], bool]]()

    def asked(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Thing:
        """The `Thing` of a question; complete at once, unless it is for a missing key."""
        verb, names = str(header["verb"]), [str(name)[:_MAX_NAME] for name in header["names"]]
        values = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
        others = [r for r in range(self._ranks) if r != rank]
        thing = Thing(rank, f"a wait for the key {', '.join(names)!r:.60} of the store", others.copy, any_of=True)
        if verb in ("get", "wait"):
            self._waiting.append((thing, names, verb == "get"))
        else:
            thing.done, thing.facts = True, {"value": self._changed(verb, names, values, header)}
            if verb == "compare_set":
                thing.tensors = [_tensor(self._values.get(names[0], values[0]))]
        self._look()
        return thing

    def _changed(self, verb: str, names: list[str], values: list[bytes], header: dict[str, Any]) -> Any:
        held = self._values
        if sum(map(len, held.values())) + sum(map(len, values)) > _MAX_BYTES or len(held) > 100_000:
            raise DataError("the store is full")
        if verb == "set":
            held[names[0]] = values[0]
        elif verb == "append":
            held[names[0]] = held.get(names[0], b"") + values[0]
        elif verb == "add":
            total = int(held.get(names[0], b"0")) + int(header["amount"])
            if total.bit_length() > 63:
                raise DataError("the sum in the store is beyond 64 bits")
            held[names[0]] = str(total).encode()
            return int(held[names[0]])
        elif verb == "compare_set":
            there = held.get(names[0])
            if there == values[0] or (there is None and not values[0]):
                held[names[0]] = values[1]
        elif verb == "check":
            return all(name in held for name in names)
        elif verb == "delete":
            return held.pop(names[0], None) is not None
        elif verb == "count":
            return len(held)
        else:
            raise DataError(f"a store has no {verb!r:.40}")
        return None

    def _look(self) -> None:
        """Complete the waits whose keys exist."""
        for thing, names, wants_value in [*self._waiting]:
            if all(name in self._values for name in names):
                thing.done = True
                thing.tensors = [_tensor(self._values[name]) for name in names] if wants_value else []
        self._waiting = [wait for wait in self._waiting if not wait[0].done and not wait[0].error]


def _tensor(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


class BrokerStore(Store):  # type: ignore[misc, unused-ignore]
    """The learner's end.

    Args:
        line: to the broker.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self._seconds: float | None = None  # none is set: for ever, or until a deadlock is seen

    def _ask(self, verb: str, *names: str, values: Sequence[bytes] = (), **facts: Any) -> tuple[Any, list[bytes]]:
        header = {"to": "transport", "do": "keys", "verb": verb, "names": names, "threads": 1, **facts}
        head, tensors = self._line.ask(header, [_tensor(bytes(value)) for value in values])
        return head.get("value"), [tensor.numpy().tobytes() for tensor in tensors]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, values=[_bytes(value)])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, values=[_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._ask("get", key, seconds=self._seconds)[1][0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask("get", *keys, seconds=self._seconds)[1]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount=amount)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", key, values=[_bytes(expected), _bytes(desired)])[1][0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", *keys)[0])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        self._ask("wait", *keys, seconds=self._seconds if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key)[0])

    def num_keys(self) -> int:
        return int(self._ask("count")[0])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
