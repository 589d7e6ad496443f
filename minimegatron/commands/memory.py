"""`minimegatron memory`: what each rank of a run will hold, by name, before anything runs.

    minimegatron memory --world-size 8 --tensor-model-parallel-size 2 --preset laptop-10m --micro-batch-size 4

The flags are those of `minimegatron train` (its --help lists them), and

    --world-size N       how many ranks there are to be (1)
    --device cuda|cpu    what they compute on (cuda)

Nothing is allocated and nothing is read: no data need be named, and a layout of a thousand GPUs is asked about on a
laptop. The vocabulary is that of the flags. A row is the first rank of a pipeline stage: the others of that stage hold
the same, up to the padding of a buffer. Under the table stands what fills the fullest rank.

`minimegatron train ... --log-memory-interval 10` prints the same table with what was counted below each row.
"""

from __future__ import annotations

from collections.abc import Sequence

from minimegatron.errors import ConfigError
from minimegatron.flags import Parser
from minimegatron.training.arguments import parse_args


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Raises:
        ConfigError: flags that do not fit together, or this number of ranks.
    """
    own = Parser(prog="minimegatron memory", add_help=False, allow_abbrev=False)
    own.add_argument("--world-size", type=int, default=1)
    own.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    own.add_argument("-h", "--help", action="store_true")
    chosen, flags = own.parse_known_args(argv)
    if chosen.help:
        print(__doc__)
        return 0
    world = chosen.world_size
    if world < 1:
        raise ConfigError(f"--world-size {world}", fix="1 rank or more")
    run = parse_args(flags, world_size=world, reads=False)

    from minimegatron.comm.mesh import rank_groups  # torch, which the flags do not need
    from minimegatron.training.memory_report import explain, predict_run, predicted_rows, table

    ranks = rank_groups(run.parallel, world, "pp")[0]
    predictions = {rank: predict_run(run, rank, world, chosen.device) for rank in ranks}
    print(table(predicted_rows(predictions)))
    fullest = max(predictions, key=lambda rank: predictions[rank].total)
    print(f"\n{explain(f'rank {fullest}', predictions[fullest])}")
    return 0
