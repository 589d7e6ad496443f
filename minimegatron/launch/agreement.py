"""Ranks compare their configuration when they meet, before they have a process group.

The problem in a sentence: a launcher on four nodes reads four command lines, four installations and four copies of the
data; ranks with another learning rate or another seed train to the end with exit status 0, and ranks with another
hidden size end inside gloo with a stack in C++.

So every rank describes its inputs as facts, name -> value, and the ranks compare them through the ledger, which
needs no group. The error has each value of a fact that differs, and its ranks::

    the ranks were not given the same: lr is 0.001 on ranks 0-2 and 0.002 on rank 3

| facts      | messages of each rank through the store                                                     |
|------------|---------------------------------------------------------------------------------------------|
| equal      | a digest of 16 bytes and a meeting                                                          |
| different  | also the facts themselves, a few kilobytes, which every rank then reads from every other    |

`training/same_run.py` collects the facts of a training run, and says which of them may differ. Megatron-LM has no such
check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minimegatron.errors import ConfigError, named, ranks_by_value
from minimegatron.launch.ledger import Ledger

Facts = Mapping[str, Any]  # values that JSON can hold
SHOWN = 8  # differences in one message


def agree(ledger: Ledger, facts: Facts, seconds: float) -> None:
    """Return when every rank has come with the same facts; all ranks must call it.

    Args:
        ledger: ledger of this rank.
        facts: the facts of this rank.
        seconds: longest wait for another rank.

    Raises:
        ConfigError: on every rank, with one text: the facts that differ, each value and its ranks.
        DeadlineError: some ranks did not come; names them.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if ledger.store.compare_set("facts", "", digest).decode() != digest:
        ledger.store.set("facts differ", "1")
    ledger.meet("facts", seconds)
    if not ledger.store.check(["facts differ"]):
        return
    ledger.store.set(f"facts/{ledger.rank}", text)
    ledger.meet("facts of every rank", seconds)
    require_agreement([json.loads(ledger.store.get(f"facts/{rank}")) for rank in range(ledger.world)])


def require_agreement(by_rank: Sequence[Facts]) -> None:
    """Refuse facts that differ between ranks.

    Args:
        by_rank: the facts of each rank.

    Raises:
        ConfigError: the facts that differ, each value and its ranks.
    """
    differing = differences(by_rank)
    if not differing:
        return
    more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    raise ConfigError(
        "the ranks were not given the same: " + "; ".join(differing[:SHOWN]) + more,
        fix="start every rank with the same command line, the same installation and the same data",
    )


def differences(by_rank: Sequence[Facts]) -> list[str]:
    """ "lr is 0.001 on ranks 0-2 and 0.002 on rank 3", for every fact that differs, in the order of their names."""
    differing = []
    for name in sorted({name for facts in by_rank for name in facts}):
        values = [_shown(facts[name]) if name in facts else "absent" for facts in by_rank]
        ranks_of = ranks_by_value(values, range(len(values)))
        if len(ranks_of) > 1:
            *first, last = [f"{value} on {named(ranks)}" for value, ranks in ranks_of.items()]
            differing.append(f"{name} is {', '.join(first)} and {last}")
    return differing


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value and value.isprintable() else repr(value)
