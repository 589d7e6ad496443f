"""Compare the first step of a run with that of one process, tensor by tensor: which module is wrong, on which rank.

    minimegatron compare --mock-data --num-layers 4 --tensor-model-parallel-size 2 --sequence-parallel
    minimegatron compare --preset laptop-10m --corpus stdlib --pipeline-model-parallel-size 2 --ranks 4 --in-precision
    minimegatron compare --corpus stdlib --bf16 --against --kernels torch --recompute-activations
    minimegatron compare --corpus stdlib --bf16 --twice 2

The flags are those of `minimegatron train` (its --help lists them), and

    --ranks N            how many ranks to start; default as few as the layout needs. Under torchrun: not needed
    --in-precision       in the run's own precision and by its kernels, with a limit that is measured; default in fp64,
                         where a limit of 1e-7 of a tensor's largest element separates mistakes from roundings
    --against FLAGS ...  compare with a run of these flags more, in the same layout: kernels, precision, recompute
    --twice [N]          take N steps (1) twice, with dropout and optimizer, and compare bit for bit
    --json FILE          write all differences to FILE; - for the output

`--against` is the last: all words after it are flags of the other run. Exit status 0 if all agree, 5 if not, 2 for a
model that one process cannot repeat. How the comparison works, and what difference is normal: `training/comparison`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.errors import ConfigError, RankError, require
from minimegatron.flags import Parser
from minimegatron.training.arguments import parse_args

MOST_RANKS, SAME = 64, 4  # ranks that are tried for a layout, and equal errors that end it


def parse(argv: Sequence[str]) -> tuple[Any, list[str], list[str] | None]:
    """(The command's own options, the flags of the run, those of `--against` or None).

    Raises:
        ConfigError: options that exclude each other.
    """
    words, other = list(argv), None
    if "--against" in words:
        at = words.index("--against")
        words, other = words[:at], words[at + 1 :]
    own = Parser(prog="minimegatron compare", add_help=False, allow_abbrev=False)
    own.add_argument("--ranks", type=int)
    own.add_argument("--in-precision", action="store_true")
    own.add_argument("--twice", type=int, nargs="?", const=1)
    own.add_argument("--json", metavar="FILE")
    own.add_argument("-h", "--help", action="store_true")
    chosen, flags = own.parse_known_args(words)
    modes = [
        name
        for name, given in (
            ("--in-precision", chosen.in_precision),
            ("--against", other is not None),
            ("--twice", chosen.twice is not None),
        )
        if given
    ]
    require(len(modes) <= 1, f"{' and '.join(modes)} are given", "one of them: each says what is compared with what")
    require(other is None or bool(other), "--against without flags", "--against --kernels torch, for example")
    require(chosen.twice is None or chosen.twice >= 1, f"--twice {chosen.twice}", "at least 1 step")
    return chosen, flags, other


def fewest_ranks(flags: Sequence[str]) -> int:
    """As few ranks as the layout of a command line needs.

    Raises:
        ConfigError: no number of ranks fits, or another mistake in the flags.
    """
    errors: list[ConfigError] = []
    for world in range(1, MOST_RANKS + 1):
        try:
            parse_args(flags, world_size=world)
        except ConfigError as wrong:
            errors.append(wrong)
            if len(errors) >= SAME and len({str(error) for error in errors[-SAME:]}) == 1:
                break  # a mistake that no number of ranks mends
        else:
            return world
    raise errors[0]


def compare(chosen: Any, flags: Sequence[str], other: Sequence[str] | None) -> None:
    """Meet the other ranks, compare, print on rank 0.

    Raises:
        RankError: something differs; on all ranks.
        MinimegatronError: flags, data, or a model that one process cannot repeat.
    """
    from minimegatron.comm.mesh import Mesh
    from minimegatron.launch import rendezvous
    from minimegatron.launch.rank import init
    from minimegatron.training.build import build_trainer
    from minimegatron.training.comparison.flags import compare_runs, same_layout
    from minimegatron.training.comparison.twice import twice
    from minimegatron.training.comparison.twin import compare_with_twin
    from minimegatron.training.comparison.verdict import table, verdict
    from minimegatron.training.rules import batch_sizes, check_repeatable
    from minimegatron.training.same_run import rank_facts
    from minimegatron.training.task import Task

    world = rendezvous.place().world
    run = parse_args(flags, world_size=world)
    against = None if other is None else parse_args([*flags, *other], world_size=world)
    if chosen.twice is None:
        check_repeatable(run, "minimegatron compare", world, alone=against is None)
    require(
        chosen.twice is not None or run.checkpoint.load is None,
        f"--load {run.checkpoint.load}: what is compared are the weights of step 0, which follow from the seed",
        "drop --load, or --twice, which goes on from a checkpoint",
    )
    require(
        not chosen.in_precision or run.model.num_experts is None,
        f"--in-precision with num_experts {run.model.num_experts}: a rounding sends a token to another expert, "
        "which is no mistake and changes everything behind it",
        "drop --in-precision: in fp64 no token changes its expert",
    )
    if against is not None:
        changed = same_layout(run, against)
        require(
            not changed,
            f"--against changes {', '.join(changed)}: a rank's tensors would be other parts",
            "the same layout, data and batch on both sides; without --against any layout is compared with one process",
        )
    rank, _ = init(run.parallel.distributed_timeout_seconds, backend=run.training.distributed_backend,
                   facts=rank_facts(run))  # fmt: skip
    mesh = Mesh.build(run.parallel)

    def say(text: str) -> None:
        if rank == 0 and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    if chosen.twice is not None:
        result: Any = twice(run, mesh, Task, functools.partial(build_trainer, quiet=True), chosen.twice)
        (what, where, fix), rows = result.verdict(), ""
    else:
        batch = batch_sizes(run.training, mesh.dp.size).global_batch_size_at(0)
        task = Task(run)
        data = task.load_data(run, mesh, (batch, 0, 0), (None, None, None), quiet=rank != 0)
        assert data.train is not None, "pre-training has a training set"
        run = dataclasses.replace(run, model=run.trained_model(data.vocab_size))
        if against is None:
            exact = not chosen.in_precision
            result = compare_with_twin(run, mesh, data.train, batch, task.forward_step, exact, say)
        else:
            against = dataclasses.replace(against, model=against.trained_model(data.vocab_size))
            result = compare_runs(run, against, mesh, data.train, batch, task.forward_step, say)
        what, where, fix = verdict(result)
        rows = table(result) if result.first is not None else ""
    say("")
    if rank == 0:
        _show(what, rows, result, chosen.json, agrees=not fix)
    if fix:
        raise RankError(what, where=where, fix=fix)


def _show(what: str, rows: str, result: Any, file: str | None, *, agrees: bool) -> None:
    text = json.dumps(result.to_dict(), indent=1, allow_nan=True)
    if file == "-":
        print(text)
    elif file is not None:
        try:
            Path(file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {error}", where=file, fix="a file that can be written") from error
    if file != "-":
        print("\n".join(filter(None, [what if agrees else "", rows])), flush=True)
        if left := getattr(result, "left_out", ()):
            print(f"not compared: {len(left)} tensors, {left[0]}" + (", ..." if len(left) > 1 else ""), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare; started without a launcher for several ranks, start them first.

    Raises:
        ConfigError: before any rank is started.
    """
    from minimegatron.launch import rendezvous

    words = list(sys.argv[1:] if argv is None else argv)
    chosen, flags, other = parse(words)
    if chosen.help:
        print(__doc__)
        return
    place = rendezvous.place()
    if not place.launcher:
        ranks = chosen.ranks or fewest_ranks(flags)
        parse_args(flags, world_size=ranks)  # a mistake is said once
        if ranks > 1:
            command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", "minimegatron", "compare"]
            os.execv(sys.executable, [sys.executable, "-m", "minimegatron", *command, *words])
    require(
        chosen.ranks in (None, place.world),
        f"--ranks {chosen.ranks}, and the launcher has started {place.world}",
        "drop --ranks under a launcher",
    )
    from minimegatron.launch.rank import run_rank

    run_rank(lambda: compare(chosen, flags, other))
