"""`minimegatron serve` with several replicas: the command line and GPUs of each, and the router in front of them.

serve FOLDER, 2 replicas, tp2 --> router, HOST:PORT
                                   +--> torchrun, 2 ranks: serve FOLDER, 127.0.0.1:free     GPUs 0, 1
                                   +--> torchrun, 2 ranks: serve FOLDER, 127.0.0.1:free     GPUs 2, 3
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from minimegatron.errors import ConfigError


def replica_argv(argv: Sequence[str], port: int, ranks: int) -> list[str]:
    """The command line of one replica: that of the router, followed by flags that override it.

    Args:
        argv: words of `minimegatron serve`.
        port: port of the replica, open to this machine alone.
        ranks: number of its processes.
    """
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", "minimegatron"] if ranks > 1 else []
    own = ["--host", "127.0.0.1", "--port", str(port), "--data-parallel-size", "1"]
    return [sys.executable, "-m", "minimegatron", *launch, "serve", *argv, *own]


def gpus_of(number: int, ranks: int, visible: Sequence[str]) -> dict[str, str]:
    """The environment that assigns GPUs to a replica; {} without GPUs.

    Args:
        number: number of the replica.
        ranks: GPUs that each replica needs.
        visible: GPUs of this process.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[number * ranks : (number + 1) * ranks])} if visible else {}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def serve_replicas(argv: Sequence[str], args: argparse.Namespace) -> None:
    """Run the replicas of `minimegatron serve`, and their router, until a signal.

    Args:
        argv: words of `minimegatron serve`.
        args: the same, parsed: data_parallel_size replicas of tp x pp x ep ranks, host and port of the router, and
            drain_timeout seconds in which requests may end.

    Raises:
        ConfigError: under torchrun, too few GPUs, or a package that is missing.
        RankError: no replica stays alive.
    """
    size = args.data_parallel_size
    ranks = (args.tensor_model_parallel_size or 1) * args.pipeline_model_parallel_size
    ranks *= args.expert_model_parallel_size
    if "RANK" in os.environ:
        raise ConfigError(
            f"{size} replicas under torchrun: each would be started on every rank",
            fix="minimegatron serve by itself, which starts the ranks of each replica",
        )
    visible = visible_gpus()
    if visible and len(visible) < size * ranks:
        raise ConfigError(
            f"{len(visible)} GPUs for {size} replicas of {ranks}", fix=f"at most {len(visible) // ranks} replicas"
        )
    try:
        from minimegatron.serving import replicas
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs the package {error.name}", fix="pip install 'minimegatron[serve]'") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def environment(number: int) -> Mapping[str, str]:
        return {**os.environ, **gpus_of(number, ranks, visible)}

    replicas.serve(
        lambda number, replica_port: replica_argv(argv, replica_port, ranks),
        size,
        args.host,
        args.port,
        environment=environment,
        drain=args.drain_timeout,
    )
