"""`minimegatron serve` with more than one replica: the command lines and the GPUs of each, and the router before them.

serve FOLDER, 2 replicas, tp2 --> router, HOST:PORT
                                   +--> torchrun, 2 ranks: serve FOLDER, 127.0.0.1:free     GPUs 0, 1
                                   +--> torchrun, 2 ranks: serve FOLDER, 127.0.0.1:free     GPUs 2, 3
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from minimegatron.errors import ConfigError, require

OWN = ("--host", "--port", "--data-parallel-size")  # flags of the router, each with a value


def replica_argv(argv: Sequence[str], port: int, ranks: int) -> list[str]:
    """The command line of one replica.

    Args:
        argv: of `minimegatron serve`.
        port: of the replica, on this machine alone.
        ranks: processes that it has.
    """
    kept, words = [], iter(argv)
    for word in words:
        if word in OWN:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in OWN)):
            kept.append(word)
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", "minimegatron"] if ranks > 1 else []
    return [sys.executable, "-m", "minimegatron", *launch, "serve", *kept, "--host", "127.0.0.1", "--port", str(port)]


def gpus_of(number: int, ranks: int, visible: Sequence[str]) -> dict[str, str]:
    """What a replica sees of the GPUs: nothing to say without any.

    Args:
        number: of the replica.
        ranks: GPUs that each needs.
        visible: of this process.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[number * ranks : (number + 1) * ranks])} if visible else {}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(i) for i in range(count)]


def serve_replicas(
    argv: Sequence[str], size: int, host: str, port: int, *, ranks: int = 1, drain: float = 10.0
) -> None:
    """Run `size` replicas of `minimegatron serve` and the router before them, until a signal.

    Args:
        argv: of `minimegatron serve`; the flags of the router among them are left out.
        size: number of replicas.
        host, port: of the router.
        ranks: processes of each replica, tp x pp x ep.
        drain: seconds in which requests may end.

    Raises:
        ConfigError: under torchrun, an argument that cannot be, or too few GPUs.
        RankError: no replica stays alive.
    """
    require(size >= 1 and ranks >= 1, f"{size} replicas of {ranks} ranks", "one of each or more")
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
        from minimegatron.serving import router
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs the package {error.name}", fix="pip install 'minimegatron[serve]'") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def environment(number: int) -> Mapping[str, str]:
        return {**os.environ, **gpus_of(number, ranks, visible)}

    router.serve(
        lambda number, replica_port: replica_argv(argv, replica_port, ranks),
        size,
        host,
        port,
        environment=environment,
        drain=drain,
    )
