"""`minimegatron memory`: what each rank of a run will hold, by name, before anything runs.

    minimegatron memory --world-size 8 --tensor-model-parallel-size 2 --preset laptop-10m --micro-batch-size 4 ...

The flags are those of `minimegatron train`, and one more: how many ranks there are to be. Nothing is allocated and
nothing is read, so a layout of a thousand GPUs is asked about on a laptop; the vocabulary is that of the flags. A row
is the first rank of a pipeline stage: the others of that stage hold the same, up to the padding of a buffer.

`minimegatron train ... --log-memory-interval 10` prints the same table with what was counted below each row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from minimegatron.errors import ConfigError
from minimegatron.training.arguments import parse_args


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Raises:
        ConfigError: flags that do not fit together, or this number of ranks.
    """
    own = argparse.ArgumentParser(prog="minimegatron memory", add_help=False, allow_abbrev=False)
    own.add_argument("--world-size", type=int, default=1)
    chosen, flags = own.parse_known_args(argv)
    if {"-h", "--help"} & set(flags):
        print(__doc__)
        return 0
    world = chosen.world_size
    if world < 1:
        raise ConfigError(f"--world-size {world}", fix="1 rank or more")
    run = parse_args(flags, world_size=world)

    from minimegatron.comm.mesh import rank_groups  # torch, which the flags do not need
    from minimegatron.training.memory_plan import predict
    from minimegatron.training.memory_report import predicted_row, table

    pipeline = rank_groups(run.parallel, world, "pp")[0]
    print(table(predicted_row(f"rank {rank}", predict(run, rank, world)) for rank in pipeline))
    return 0
