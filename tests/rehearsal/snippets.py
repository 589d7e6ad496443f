"""Pieces of code, each on a clean record: `... tests.rehearsal.snippets CODE.json` reports for each what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.launch.rank import report
from tests.rehearsal.record import RECORD


def happened(code: str) -> dict[str, Any]:
    """Its error, the kinds of waits, the launches and choices, and what it leaves in `answer`."""
    RECORD.clear()
    names: dict[str, Any] = {"torch": torch, "F": F, "answer": None}
    names["x"], names["y"] = torch.ones(4, 4, device="cuda:0"), torch.arange(4.0).cuda(0)
    names["i"], names["host"] = torch.arange(4).cuda(0), torch.ones(4, 4)
    RECORD.clear()
    found: dict[str, Any] = {}
    try:
        exec(code, names)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    waits = sorted(kind for _, kind, _ in RECORD.waits.elements())
    launches = sorted(operator for _, operator in RECORD.launches.elements())
    choices = sorted(what for _, what in RECORD.choices.elements())
    return {**found, "waits": waits, "launches": launches, "choices": choices, "answer": names["answer"]}


if __name__ == "__main__":
    report({name: happened(code) for name, code in json.loads(Path(sys.argv[1]).read_text()).items()})
