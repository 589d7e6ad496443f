"""Which replica answers a request.

The problem in a sentence: replicas share no pages, so a prompt is cheap for the replica that has cached its beginning,
and expensive for the others; yet if all prompts begin alike, all replicas must work.

**Routing**: consistent hashing with bounded loads. Each replica has `POINTS` places on a circle. A request goes to the
first place after the hash of its prompt's beginning whose replica has fewer requests under way than the bound:

    bound = ceil(c (m + 1) / n)      m requests under way at n ready replicas, c = 1.25

So equal beginnings meet at one replica, no replica has more than c times its share, and when a replica dies only its
own prompts move. A request without a prompt goes to the least loaded replica. Mirrokni, Thorup, Zadimoghaddam 2018
(arXiv 1608.01350).
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from minimegatron.serving.http_client import Client

POINTS = 64  # places of a replica on the circle: shares of the hash range differ by about 1/8
BEGINNING = 256  # characters of a prompt that are hashed (or 64 ids): about four pages of 16 tokens
SLACK = 1.25  # c


@dataclasses.dataclass(eq=False)
class Replica:
    """An engine's server, as the router sees it.

    Attributes:
        number: the label `engine` of its metrics.
        client: connected to its address.
        ready: it answers `/health` with 200, and gets requests.
        under_way: number of its open requests.
        served, failed: total requests; deaths: of its process.
        left_out: it died too often, and is not restarted.
        answered: when its process last answered `/health`, by the event loop's clock; infinite before the first time.
    """

    number: int
    client: Client
    ready: bool = False
    under_way: int = 0
    served: int = 0
    failed: int = 0
    deaths: int = 0
    left_out: bool = False
    answered: float = math.inf

    def state(self) -> dict[str, Any]:
        """Its entry in the body of `/health`."""
        state = "ready" if self.ready else "left out" if self.left_out else "not ready"
        return {"engine": self.number, "state": state, "under_way": self.under_way, "deaths": self.deaths}


class Ring:
    """The circle of consistent hashing: key -> order of the replicas.

    Args:
        numbers: of the replicas.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._places = sorted((_hash(f"{n}/{i}".encode()), n) for n in numbers for i in range(POINTS))
        self._count = len(numbers)

    def order(self, key: bytes) -> list[int]:
        """All replicas, in the order of their first places after the key's."""
        start = bisect.bisect(self._places, (_hash(key), -1))
        found = dict.fromkeys(n for _, n in [*self._places[start:], *self._places[:start]])
        return list(found)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def beginning(body: bytes) -> bytes | None:
    """The key of a request: model and first characters, or ids, of its prompt; None without a prompt."""
    try:
        fields = json.loads(body)
        prompt, model = fields.get("prompt", fields.get("messages")), fields.get("model")
    except (ValueError, AttributeError, RecursionError):
        return None  # a replica will answer what is wrong with it
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):  # a batch is routed by its first
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = "".join(f"{m.get('role')}\n{m.get('content')}\n" for m in prompt if isinstance(m, dict))
    elif isinstance(prompt, list):
        prompt = " ".join(map(str, prompt[: BEGINNING // 4]))
        return f"{model}\n{prompt}".encode(errors="replace")
    return f"{model}\n{prompt[:BEGINNING]}".encode(errors="replace") if isinstance(prompt, str) and prompt else None


def choose(replicas: Sequence[Replica], ring: Ring, key: bytes | None, tried: set[int]) -> Replica | None:
    """The replica for a request, ready and not in `tried`; None if there is none."""
    ready = [r for r in replicas if r.ready]
    left = {r.number: r for r in ready if r.number not in tried}
    if not left:
        return None
    if key is not None:
        bound = math.ceil(SLACK * (sum(r.under_way for r in ready) + 1) / len(ready))
        for number in ring.order(key):
            if number in left and left[number].under_way < bound:
                return left[number]
    return min(left.values(), key=lambda r: (r.under_way, r.number))
