"""`minimegatron serve` on ranks. It imports no Hugging Face, which every rank would have to load."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from typing import Any
from unittest import mock

from minimegatron.commands.serve import parse, serve
from minimegatron.inference.engine import Engine
from minimegatron.serving import engine_thread
from minimegatron.serving.app import Server
from tests.serving.waiting import wait_until


def served(rank: int, world: int, argv: list[str], bodies: list[dict[str, Any] | None]) -> tuple[list[Any], int]:
    """What a server answers on rank 0 to requests that begin once it has been idle: (answers, idle messages).

    None asks for the models. The other ranks get SIGTERM before, as a launcher sends it to all.
    """
    answers: list[Any] = []
    idle = threading.Semaphore(0)

    def ask(server: Server) -> None:
        try:
            assert all(idle.acquire(timeout=30) for _ in range(3)), "rank 0 says nothing"
            wait_until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            for body in bodies:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                if body is None:
                    connection.request("GET", "/v1/models")
                else:
                    headers = {"Content-Type": "application/json"}
                    connection.request("POST", "/v1/completions", json.dumps(body), headers)
                answers.append(json.loads(connection.getresponse().read()))
                connection.close()
        finally:
            server.handle_exit(15)

    client: list[threading.Thread] = []

    def began(server: Server) -> None:
        beat = server.service.engine.heartbeat

        def counted() -> None:
            beat()
            idle.release()

        server.service.engine.heartbeat = counted  # type: ignore[method-assign]
        client.append(threading.Thread(target=ask, args=(server,)))
        client[0].start()

    follow = Engine.follow

    def terminated(engine: Engine) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        follow(engine)

    with mock.patch.object(engine_thread, "HEARTBEAT_SECONDS", 0.05), mock.patch.object(Engine, "follow", terminated):
        serve(parse(argv), began)
    for thread in client:
        thread.join(30)
    return answers, len(client)
