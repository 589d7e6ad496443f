"""Train a GPT from the command line, on one process or under torchrun.

    minimegatron train --preset laptop-10m --corpus stdlib --train-iters 100 --lr 1e-3

    torchrun --nproc-per-node 4 -m minimegatron train --tensor-model-parallel-size 2 --sequence-parallel ...

The flags are Megatron-LM's; `--help` lists them. The command line is checked against every rule before the ranks meet,
so a mistake costs a second and not a place in a queue. When they meet, they compare what they were given.

| exit status | when                                                                                       |
|-------------|--------------------------------------------------------------------------------------------|
| 0           | done, or stopped as asked: `--exit-interval`, `--exit-duration-in-mins`, SIGTERM           |
| 2           | a flag, or flags that do not fit together or this number of ranks; ranks that were given   |
|             | different flags, versions or data; GPUs that are there and cannot be used, or are too few  |
| 3           | a checkpoint                                                                               |
| 4           | the data                                                                                   |
| 5           | a rank failed, died, or its replicas differ                                                |
| 6           | a loss or gradient that is not finite                                                      |
| 7           | a rank did not come in time                                                                |
| 130         | Ctrl-C                                                                                     |
| 143         | a second SIGTERM, at once; what was being saved is as if it had never begun                |

These are a rank's own. torchrun itself leaves with 1 whenever a rank's status is not 0, and prints a report of some 40
lines below the rank's error. `minimegatron torchrun` is the same launcher without the report; its status is a rank's.

Megatron-LM: `pretrain_gpt.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minimegatron.training.arguments import parse_args

if TYPE_CHECKING:
    from minimegatron.training.trainer import Trainer


def build_trainer(*args: Any, **options: Any) -> Trainer:
    """`minimegatron.training.build.build_trainer`, which imports torch."""
    from minimegatron.training import build

    return build.build_trainer(*args, **options)


def pretrain(argv: Sequence[str], task: str | None = None) -> Trainer:
    """Parse, check, meet the other ranks, train; returns the trainer at the end.

    Args:
        argv: the command line's words.
        task: a task after pre-training (`config/posttraining`), or None.

    Raises:
        MinimegatronError: see the table of this module.
    """
    from minimegatron.launch import flight_records, hardware, rendezvous
    from minimegatron.launch.rank import described, init
    from minimegatron.training.same_run import rank_facts

    run = parse_args(argv, world_size=rendezvous.place().world, task=task)
    warning = hardware.prepare_for_pipelines() if run.parallel.pipeline_model_parallel_size > 1 else ""
    training = run.training
    flight_records.configure(training.flight_recorder_trace_buffer_size, training.flight_recorder_dump_path)
    seconds = run.parallel.distributed_timeout_seconds
    rank, _ = init(seconds, backend=run.training.distributed_backend, facts=rank_facts(run))
    if rank == 0:
        print("\n".join(filter(None, [described(), warning])), flush=True)
    if task is None:
        trainer = build_trainer(run)
    else:
        from minimegatron.posttraining.tasks import TASKS

        trainer = build_trainer(run, task=TASKS[task])
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def main(argv: Sequence[str] | None = None, task: str | None = None) -> int:
    """The whole life of this process; see the table of exit statuses. `--help` answers without importing torch."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        parse_args(words, task=task)
    try:
        from minimegatron.launch.rank import run_rank
    except KeyboardInterrupt:  # the imports of a rank take seconds; where Ctrl-C meets them is of no interest
        sys.exit(130)
    run_rank(lambda: pretrain(words, task))


if __name__ == "__main__":
    main()
