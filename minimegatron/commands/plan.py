"""`minimegatron plan`: will it fit, how long does a step take, and which layout; before anything runs.

    minimegatron plan --cluster h100 --world-size 256 --preset llama3-70b --seq-length 8192 --global-batch-size 512 \\
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --bf16 --tokens 1e12
    minimegatron plan --search --cluster h100 --world-size 4096 --preset llama3-70b --global-batch-size 2048 --bf16
    minimegatron plan --measure here.json

The flags of the run are those of `minimegatron train` (its --help lists them): a preset, `--load` with the folder of a
published model, or Megatron's flags. And

    --cluster NAME|FILE.json   a100, h100, h200, b200, or a file that --measure has written (h100)
    --world-size N             how many GPUs (1)
    --tokens N                 the time, and with a price the cost, of a training on so many
    --price X                  of a GPU for an hour
    --explain                  the formula of every number
    --search                   all layouts; what a flag sets stays as it is
    --top N                    how many of them (5)
    --pictures FOLDER          pictures of it too, as PNG
    --measure FILE.json        time this machine instead, with N ranks at once on a CPU, and write the file

Nothing is allocated and nothing is read: no data need be named. Where a run does not fit, the table says what is to
blame and which three changes, the cheapest first, make it fit; the exit status is then 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.errors import require
from minimegatron.flags import Parser
from minimegatron.training.arguments import parse_args


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan.

    Returns:
        0, or 1 if it does not fit.

    Raises:
        ConfigError: flags that do not fit together, this number of GPUs, or a cluster that does not exist.
    """
    own = Parser(prog="minimegatron plan", add_help=False, allow_abbrev=False)
    own.add_argument("--cluster", default="h100")
    own.add_argument("--world-size", type=int, default=1)
    own.add_argument("--tokens", type=float)
    own.add_argument("--price", type=float)
    own.add_argument("--top", type=int, default=5)
    own.add_argument("--measure", type=Path)
    own.add_argument("--pictures", type=Path)
    for flag in ("--explain", "--search", "-h", "--help"):
        own.add_argument(flag, action="store_true")
    chosen, flags = own.parse_known_args(argv)
    if chosen.help or chosen.h:
        print(__doc__)
        return 0
    require(chosen.world_size >= 1, f"--world-size {chosen.world_size}", "1 GPU or more")
    if chosen.measure is not None:
        return _measure(chosen.measure, chosen.world_size)

    from minimegatron.planner.cluster import read_cluster  # torch, which the flags do not need

    cluster = read_cluster(chosen.cluster)
    if chosen.pictures is not None:
        from minimegatron.planner.pictures import ready  # before anything takes time

        ready(chosen.pictures)
    cluster = cluster if chosen.price is None else cluster.replace(price=chosen.price)
    if chosen.search:
        return _search(flags, chosen, cluster)

    from minimegatron.planner import report
    from minimegatron.planner.planning import cheapest_changes, plan

    planned = plan(parse_args(flags, chosen.world_size, reads=False), chosen.world_size, cluster)
    print(report.in_words(planned, chosen.tokens, chosen.explain))
    _draw(chosen.pictures, planned)
    if planned.fits or planned.unknown:
        return 0 if planned.fits else 1
    print(f"\n{report.changes_text(cheapest_changes(planned))}")
    return 1


def _search(flags: list[str], chosen: argparse.Namespace, cluster: Any) -> int:
    from minimegatron.planner import report
    from minimegatron.planner.search import search

    base = parse_args(flags, reads=False)
    seen: list[tuple[float, float]] = []
    plans = search(base, chosen.world_size, cluster, chosen.top, seen)
    best = plans[0]
    print(report.search_text(plans))
    print(f"\n{report.in_words(best.plan, chosen.tokens, chosen.explain)}\n")
    print(report.commands([*flags, *best.layout.flags(base)], chosen.world_size, cluster.gpus_per_node))
    _draw(chosen.pictures, best.plan, plans, seen)
    return 0


def _draw(folder: Path | None, *what: Any) -> None:
    from minimegatron.planner.pictures import draw

    if folder is not None:
        for name, figure in draw(*what).items():
            figure.savefig(folder / f"{name}.png", bbox_inches="tight")


def _measure(file: Path, ranks: int) -> int:
    import torch

    from minimegatron.planner.cluster import write_cluster
    from minimegatron.planner.measure import measure

    cluster = measure(torch.device("cuda" if torch.cuda.is_available() else "cpu"), ranks=ranks)
    write_cluster(cluster, file)
    print(
        f"{cluster.gpu}: {cluster.matmul * cluster.matmul_share / 1e12:.3g} TFLOP/s, "
        f"{cluster.copy * cluster.copy_share / 1e9:.3g} GB/s, "
        f"links {cluster.inside * cluster.link_share / 1e9:.3g} GB/s; written to {file}"
    )
    return 0
