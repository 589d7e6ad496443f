"""Notebooks as learners hand them in, written by a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPEN = "%load_ext course\n%lab 00_mini tests.labkit.mini_course"
BUBBLE = "%%exercise bubble\ndef bubble(p, m):\n    return (p - 1) / (m + p - 1)\n"
DOUBLE = "%%exercise double\ndef double(x):\n    return 2 * x\n"
RING = """%%exercise ring_all_reduce
import torch
import torch.distributed as dist

def ring_all_reduce(x):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, travelling = x.clone(memory_format=torch.contiguous_format), x.contiguous()
    for _ in range(world - 1):
        arriving = torch.empty_like(total)
        sent = dist.isend(travelling, (rank + 1) % world)
        dist.recv(arriving, (rank - 1) % world)
        sent.wait()
        total += arriving
        travelling = arriving
    return total
"""
SOLVED = [OPEN, BUBBLE, 'check("bubble")', RING, 'check("ring_all_reduce")', DOUBLE, 'check("double")']


def stub(name: str) -> str:
    return f"%%exercise {name}\ndef {name}(*args, **kwargs):\n    raise NotImplementedError('your code here')\n"


UNTOUCHED = [OPEN, stub("bubble"), stub("ring_all_reduce"), stub("double")]


def notebook(cells: Iterable[str], **metadata: Any) -> str:
    """The text of a notebook of nbformat 4."""
    code = [
        {"cell_type": "code", "id": f"c{i}", "source": text.splitlines(keepends=True), "outputs": [],
         "execution_count": None, "metadata": {}}
        for i, text in enumerate(cells)
    ]  # fmt: skip
    prose = {"cell_type": "markdown", "id": "m", "source": "# A lab", "metadata": {}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": [prose, *code]})


def hand_in(folder: Path, files: dict[str, str]) -> Path:
    """Write {path: text} below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
