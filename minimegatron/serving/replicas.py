"""The processes behind a router: started, watched, restarted, ended.

| a replica's process                                   | effect                                                      |
|-------------------------------------------------------|-------------------------------------------------------------|
| ends                                                  | it is restarted after 1, 2, 4, ... seconds                  |
| ends `MOST_DEATHS` times in a row, each time within   | it is left out, and the log says so                         |
| `HEALTHY` seconds of its start                        |                                                             |
| was ready, and does not answer `/health` for `HUNG` s | it is killed, and so restarted                              |
| runs when the router ends                             | it gets SIGTERM, lets requests finish, and later SIGKILL    |
| runs when the router is killed                        | the kernel sends SIGTERM (`launch/procs.die_with_parent`)   |
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minimegatron.errors import ConfigError, RankError
from minimegatron.launch.procs import die_with_parent, how_it_ended
from minimegatron.serving.balance import Replica
from minimegatron.serving.router import Router

log = logging.getLogger(__name__)

MOST_DEATHS, HEALTHY, HUNG = 5, 60.0, 60.0


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Processes:
    """The replicas' processes; see the table above.

    Args:
        router: of these replicas.
        command: (number, port) -> the command line of a replica.
        environment: number -> environment variables of its process; None: those of this process.
        backoff: seconds before the first restart, doubled for each one after.
        hung: seconds without an answer after which a process that was ready is killed.
    """

    def __init__(
        self,
        router: Router,
        command: Callable[[int, int], Sequence[str]],
        environment: Callable[[int], Mapping[str, str] | None] = lambda number: None,
        backoff: float = 1.0,
        hung: float = HUNG,
    ) -> None:
        self.router, self.command, self.environment, self.backoff = router, command, environment, backoff
        self.hung = hung
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    async def keep(self, replica: Replica) -> None:
        """Keep a replica's process running, until it has died too often or this task is cancelled."""
        loop, in_a_row = asyncio.get_running_loop(), 0
        while True:
            port = replica.client.port
            line, began = list(self.command(replica.number, port)), loop.time()
            process = subprocess.Popen(
                line,
                env=self.environment(replica.number),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the router alone, which lets requests finish
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM, os.getpid()),
            )
            self.running[replica.number], replica.answered = process, math.inf
            silent = ""
            while (status := process.poll()) is None:
                if loop.time() - replica.answered > self.hung:
                    silent = f" after {self.hung:g} s without an answer to GET /health"
                    replica.answered = math.inf
                    process.kill()  # its ranks die with it: `launch/rank`
                await asyncio.sleep(0.2)
            replica.deaths += 1
            why = f"its process (pid {process.pid}) {how_it_ended(status)}{silent}"
            in_a_row = 1 if loop.time() - began > HEALTHY else in_a_row + 1
            if in_a_row >= MOST_DEATHS:
                replica.left_out = True
                self.router.lost(replica, why)
                log.error("replica %d is left out: %s, %d times in a row", replica.number, why, in_a_row)
                return
            pause = self.backoff * 2 ** (in_a_row - 1)
            self.router.lost(replica, why)
            log.warning("replica %d is started again in %g s: %s", replica.number, pause, why)
            await asyncio.sleep(pause)

    def end(self, seconds: float = 15.0) -> None:
        """Send SIGTERM to all processes, and SIGKILL to those that run after so many seconds."""
        alive = [process for process in self.running.values() if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        for process in alive:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(seconds)


def serve(
    command: Callable[[int, int], Sequence[str]],
    size: int,
    host: str,
    port: int,
    *,
    environment: Callable[[int], Mapping[str, str] | None] = lambda number: None,
    drain: float = 10.0,
    hung: float = HUNG,
) -> None:
    """Run `size` replicas and a router in front of them, until SIGTERM or SIGINT.

    After the first signal open requests have `drain` seconds to finish, and new ones get 503; a second ends at once.

    Args:
        command: (number, port) -> the command line of a replica, which serves 127.0.0.1:port.
        size: number of replicas.
        host, port: address of the router.
        environment: see `Processes`.
        drain: seconds.
        hung: see `Processes`.

    Raises:
        ConfigError: the address is taken, or not this machine's.
        RankError: all replicas were left out.
    """
    import uvicorn

    from minimegatron.serving.http_server import Http, allow_files

    allow_files()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be served: {error}", fix="another --port, or --host") from error
    address.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as in `serving/app`
    told = "%d replicas are started; they answer on the page http://%s:%d/, and OpenAI's clients below /v1 there"
    log.info(told, size, host, address.getsockname()[1])
    router = Router([f"http://127.0.0.1:{free}" for free in free_ports(size)])
    processes = Processes(router, command, environment, hung=hung)

    class Server(uvicorn.Server):
        """uvicorn's server, which drains before it ends."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if router.draining:
                self.force_exit = True
                self.should_exit = True
            router.draining = True

    async def main() -> None:
        config = uvicorn.Config(router, http=Http, lifespan="off", ws="none", log_config=None, access_log=False)
        server = Server(config)
        loop = asyncio.get_running_loop()
        keeping = [asyncio.create_task(processes.keep(replica)) for replica in router.replicas]
        watching = asyncio.create_task(router.watch())
        serving = asyncio.create_task(server.serve(sockets=[address]))
        try:
            until = math.inf
            while not serving.done() and not server.should_exit:
                if all(task.done() for task in keeping):
                    raise RankError(f"all {size} replicas were left out", fix="the log above says how each ended")
                if router.draining:
                    until = min(until, loop.time() + drain)
                    server.should_exit = router.under_way == 0 or loop.time() > until
                await asyncio.sleep(0.1)
        finally:
            server.should_exit = server.force_exit = True
            for task in (*keeping, watching):
                task.cancel()
            await asyncio.wait([*keeping, watching, serving], timeout=10)
        if serving.done() and (error := serving.exception()) is not None:
            raise error

    try:
        asyncio.run(main())
    finally:
        processes.end()
