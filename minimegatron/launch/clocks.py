"""How far the clock of each machine is from that of rank 0's, measured once, when the ranks have met.

The problem in a sentence: which of two ranks was late is a question of milliseconds, and clocks of machines differ by
as much.

As in NTP, the rank that asks notes its time before and after, and takes the answer to be from the middle::

    rank r   t0 --- ping ---> rank 0 answers with its time T --- pong ---> t1        offset = T - (t0 + t1) / 2

which is wrong by at most half of the way there and back. The fastest of `ROUNDS` counts. It goes through the store, so
it needs no process group; one rank of each machine asks, the others take its answer. Ranks of one machine have one
clock: then nothing is sent. Clocks that drift by some microseconds a second are as far apart again after an hour.

Mills 1991, Internet time synchronization: the network time protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from minimegatron.launch.ledger import Ledger

ROUNDS = 8


def offset(ledger: Ledger, machines: Sequence[Hashable], clock: Callable[[], int] = time.time_ns) -> int:
    """Nanoseconds to add to the clock of this machine so that it shows the time of rank 0; all ranks call it.

    Args:
        ledger: of this rank.
        machines: what tells the machine of each rank from others.
        clock: the time of this machine in nanoseconds.

    Raises:
        DistError: a rank does not answer within the deadline of the store.
    """
    askers = [machines.index(machine) for machine in dict.fromkeys(machines)][1:]
    store, rank = ledger.store, ledger.rank
    if rank == 0:
        for asker in askers:
            for number in range(ROUNDS):
                store.get(f"ping/{asker}/{number}")
                store.set(f"pong/{asker}/{number}", str(clock()))
    first = machines.index(machines[rank])
    if first == 0:
        return 0
    if rank == first:
        rounds = [_round(ledger, number, clock) for number in range(ROUNDS)]
        store.set(f"offset/{rank}", str(min(rounds)[1]))
    return int(store.get(f"offset/{first}"))


def _round(ledger: Ledger, number: int, clock: Callable[[], int]) -> tuple[int, int]:
    """Time there and back, and the offset."""
    begin = clock()
    ledger.store.set(f"ping/{ledger.rank}/{number}", "1")
    answer = int(ledger.store.get(f"pong/{ledger.rank}/{number}"))
    end = clock()
    return end - begin, answer - (begin + end) // 2
