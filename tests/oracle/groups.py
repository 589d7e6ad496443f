"""Ask Megatron's `RankGenerator` which ranks belong together, for many layouts.

A layout with 4,096 ranks has tens of thousands of groups, so a digest stands for the list: sha256 of the JSON list of
lists without spaces, as `digest` below computes it. Layouts of up to 16 ranks keep the lists too, for reading.

Tokens of the dense grid: tp, cp, dp, pp and the combinations that training communicates over. Of the expert grid: tp
there is expert tensor parallel, dp is expert data parallel.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

DENSE = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-dp-cp", "tp-pp")
EXPERT = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp")
DEFAULT = "tp-cp-ep-dp-pp"

# world, tp, cp, pp, ep, etp, order
LAYOUTS: tuple[tuple[int, int, int, int, int, int, str], ...] = (
    (1, 1, 1, 1, 1, 1, DEFAULT),
    (2, 1, 1, 1, 1, 1, DEFAULT),
    (2, 2, 1, 1, 1, 2, DEFAULT),
    (2, 1, 2, 1, 1, 1, DEFAULT),
    (2, 1, 1, 2, 1, 1, DEFAULT),
    (2, 1, 1, 1, 2, 1, DEFAULT),
    (4, 2, 1, 1, 1, 2, DEFAULT),
    (4, 2, 1, 2, 1, 2, DEFAULT),
    (4, 2, 1, 1, 2, 2, DEFAULT),
    (4, 1, 1, 1, 2, 2, DEFAULT),
    (6, 3, 1, 2, 1, 3, DEFAULT),
    (8, 2, 2, 2, 1, 2, DEFAULT),
    (8, 2, 1, 2, 2, 2, DEFAULT),
    (8, 2, 2, 1, 4, 1, DEFAULT),
    (8, 4, 1, 2, 4, 1, DEFAULT),
    (8, 1, 2, 2, 4, 1, DEFAULT),
    (12, 2, 1, 3, 2, 1, DEFAULT),
    (16, 2, 2, 2, 4, 1, DEFAULT),
    (16, 2, 2, 2, 1, 2, DEFAULT),
    (16, 4, 1, 2, 2, 4, DEFAULT),
    (16, 2, 1, 2, 8, 1, DEFAULT),
    (16, 1, 4, 2, 2, 2, DEFAULT),
    (16, 2, 2, 2, 2, 2, "tp-cp-ep-pp-dp"),
    (16, 2, 2, 2, 4, 1, "tp-cp-ep-pp-dp"),
    (16, 2, 2, 4, 2, 2, "cp-tp-ep-dp-pp"),
    (16, 2, 2, 4, 1, 2, "pp-dp-cp-tp"),
    (16, 2, 2, 2, 1, 2, "tp-cp-dp-pp"),
    (16, 2, 1, 2, 2, 2, "tp-dp-ep-cp-pp"),
    (16, 2, 2, 2, 1, 2, "dp-tp-cp-ep-pp"),
    (24, 2, 3, 2, 2, 3, DEFAULT),
    (32, 4, 2, 2, 2, 4, "tp-ep-cp-dp-pp"),
    (32, 4, 2, 2, 8, 1, "ep-tp-cp-dp-pp"),
    (64, 4, 2, 4, 8, 1, DEFAULT),
    (64, 2, 4, 2, 4, 2, "cp-tp-dp-ep-pp"),
    (96, 4, 3, 4, 2, 1, DEFAULT),
    (128, 8, 2, 4, 8, 2, DEFAULT),
    (256, 8, 1, 8, 8, 1, DEFAULT),
    (256, 8, 2, 4, 1, 8, "tp-cp-ep-pp-dp"),
    (512, 8, 4, 8, 16, 1, DEFAULT),
    (1024, 8, 1, 16, 8, 8, DEFAULT),
    (1024, 4, 8, 8, 32, 1, DEFAULT),
    (1536, 8, 3, 16, 4, 2, DEFAULT),
    (2048, 8, 2, 16, 64, 1, DEFAULT),
    (4096, 8, 4, 16, 64, 1, DEFAULT),
    (4096, 8, 16, 32, 1, 8, "cp-tp-ep-dp-pp"),
)


def digest(groups: list[list[int]]) -> str:
    """sha256 of the groups as JSON without spaces."""
    return hashlib.sha256(json.dumps(groups, separators=(",", ":")).encode()).hexdigest()


def make() -> dict[str, Any]:
    """One entry per layout: its sizes, the digests of both grids, and the lists where they are short.

    `refused` marks a layout that Megatron turns down because the two grids cut the pipeline differently.
    """
    from megatron.core.parallel_state import RankGenerator

    entries = []
    for world, tp, cp, pp, ep, etp, order in LAYOUTS:
        dp, edp = world // (tp * cp * pp), world // (etp * ep * pp)
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
        lists = {
            "dense": {token: dense.get_ranks(token) for token in DENSE},
            "expert": {token: expert.get_ranks(token) for token in EXPERT},
        }
        layout = {
            "world_size": world,
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "order": order,
        }
        entry: dict[str, Any] = {"layout": layout, "refused": dense.get_ranks("pp") != expert.get_ranks("pp")}
        entry["sha256"] = {grid: {t: digest(g) for t, g in tokens.items()} for grid, tokens in lists.items()}
        if world <= 16:
            entry["groups"] = lists
        entries.append(entry)
    return {"layouts": entries}
