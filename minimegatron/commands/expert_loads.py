"""`minimegatron experts`: how evenly the experts of a training were loaded, from its log file.

It reads the file that the training wrote with `--log-file` and prints the table of `layers/moe/placement`, which also
explains its columns. `--expert-model-parallel-size` computes it for another number of ranks than the training had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minimegatron.errors import ConfigError, DataError
from minimegatron.flags import Parser
from minimegatron.layers.moe.balance import LayerLoad
from minimegatron.layers.moe.placement import WINDOW, summarise, table


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Raises:
        ConfigError, DataError: no such file, no experts in it, or numbers that are not possible.
    """
    parser = Parser(
        "minimegatron experts",
        description="How evenly the experts of a training were loaded, and a placement that would balance its ranks.",
        epilog="example: minimegatron train ... --num-experts 8 --log-file run.jsonl; minimegatron experts run.jsonl "
        "--expert-model-parallel-size 4 says what four ranks would get of a training on one.",
    )
    parser.add_argument("log", help="the file that --log-file of the training wrote")
    parser.add_argument(
        "--last", type=int, default=WINDOW, metavar="N", help="logged steps to add up (default: %(default)s)"
    )
    parser.add_argument(
        "--expert-model-parallel-size", type=int, metavar="P", help="ranks that share the experts (default: the log's)"
    )
    args = parser.parse_args(argv)
    if args.last < 1:
        raise ConfigError(f"--last {args.last}", fix="at least 1")
    config, steps = read_log(args.log)
    ranks = args.expert_model_parallel_size or config.get("parallel", {}).get("expert_model_parallel_size", 1)
    groups = config.get("model", {}).get("moe_router_num_groups")
    what = "logged step" if config.get("training", {}).get("log_interval", 1) > 1 else "step"
    print(table(summarise(steps[-args.last :], ranks, groups), what))
    return 0


def read_log(path: str) -> tuple[Mapping[str, Any], list[list[LayerLoad]]]:
    """(configuration, the loads of every logged step) of a log file.

    Raises:
        DataError: no such file, a line that is not JSON, or no experts in it.
    """
    config: Mapping[str, Any] = {}
    steps: list[list[LayerLoad]] = []
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}", fix="the file of --log-file") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record.get("event") == "config":
                config, steps = record, []  # a file that is written on holds several trainings: the last one counts
            elif record.get("event") == "train" and record.get("experts"):
                steps.append([LayerLoad(**load) for load in record["experts"]])
        except (ValueError, TypeError, AttributeError) as error:
            what = f"{path} line {number} is no record of a training: {error}"
            raise DataError(what, fix="the file of --log-file") from error
    if not steps:
        raise DataError(f"{path} holds no step of a model with experts", fix="--num-experts, and --log-interval below")
    return config, steps
