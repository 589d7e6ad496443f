"""`python -m tests.course.fake_service PORT DEADLINE KIND FAULTS`: a deployment without a model, right or with faults.

KIND is `router` (two of these processes behind minimegatron's router), `replica`, or `serial`, a replica that answers
one after the other; FAULTS are some of those below, with commas between. A token is a word that the prompt and its
place decide, and takes `STEP` seconds however many come.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys

WORDS = "one two three four five six seven eight nine ten".split()
STEP, MOST, ROOM = 0.002, 448, 24
FAULTS = (
    "drops stop", "no queue", "no retry-after", "cuts", "leaks pages", "loses requests", "silent death", "no deadline",
    "other words", "one works", "cuts late",
)  # fmt: skip


def word(prompt: str, place: int) -> str:
    """The token at a place of the answer to a prompt."""
    return " " + WORDS[hashlib.blake2b(f"{prompt}/{place}".encode(), digest_size=2).digest()[0] % len(WORDS)]


def answer(prompt: str, tokens: int) -> str:
    return "".join(word(prompt, i) for i in range(tokens))


class Replica:
    def __init__(self, deadline: float, serial: bool, fault: str) -> None:
        self.deadline, self.faults = deadline, set(fault.split(", "))
        assert self.faults <= {"", *FAULTS}
        self.open = self.pages = 0
        self.turn = asyncio.Semaphore(1 if serial else 10**6)

    async def tokens(self, body):
        """(text, reason or None) pairs; an error where the deadline is over."""
        prompt, most = body["prompt"], body.get("max_tokens", 16)
        stops = [] if "drops stop" in self.faults else body.get("stop") or []
        until = asyncio.get_running_loop().time() + self.deadline
        made = sent = ""
        if "cuts" in self.faults:
            most -= most // 4
        if "cuts late" in self.faults and self.open > 9:
            most //= 2
        async with self.turn:
            for i in range(most):
                if "no deadline" not in self.faults and asyncio.get_running_loop().time() > until:
                    raise TimeoutError
                await asyncio.sleep(STEP)
                made += word(prompt + ("!" if "other words" in self.faults else ""), i)
                found = min((made.index(stop) for stop in stops if stop in made), default=None)
                if found is not None:
                    yield made[len(sent) : found], "stop"
                    return
                held = made[: len(made) - 8] if stops and i < most - 1 else made  # what a stop may begin with waits
                if len(held) > len(sent) or i == most - 1:
                    yield held[len(sent) :], "length" if i == most - 1 else None
                    sent = held

    async def serve(self, reader, writer):
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.respond(first.split(" ")[1], raw, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def respond(self, path, raw, writer):
        def plain(status, content, *more):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *more]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)

        if path != "/v1/completions":
            known = {"/v1/models": {"data": [{"id": "fake"}]}, "/health": {}}
            running = f"vllm:num_requests_running {self.open}\nvllm:num_requests_waiting 0\n"
            text = f"vllm:kv_cache_usage_perc {self.pages / 1000}\n{running}".encode()
            return plain(200, text if path == "/metrics" else known[path])
        try:
            body = json.loads(raw)
            long = len(body["prompt"].split()) + body.get("max_tokens", 16) > MOST
            if long or body["model"] != "fake" or body["temperature"] < 0:
                raise ValueError("wrong")
        except ValueError as error:
            return plain(400, {"error": {"message": str(error)}})
        if self.open >= ROOM and "no queue" not in self.faults:
            more = () if "no retry-after" in self.faults else ("retry-after: 1",)
            return plain(429, {"error": {"message": "full"}}, *more)
        self.open += 1
        self.pages += 1
        try:
            await self.complete(body, writer, plain)
        finally:
            self.open -= 1
            self.pages -= "leaks pages" not in self.faults

    async def complete(self, body, writer, plain):
        text, count, reason = "", 0, None
        stream = body.get("stream")
        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

        def event(content):
            piece = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

        try:
            async for piece, reason in self.tokens(body):
                text += piece
                if stream:
                    event({"choices": [{"index": 0, "text": piece, "finish_reason": reason}]})
                    await writer.drain()
        except TimeoutError:
            error = {"error": {"message": "the request took too long"}}
            return plain(504, error) if not stream else (event(error), writer.write(b"0\r\n\r\n"))
        count = len(text.split())
        if self.faults & {"cuts", "cuts late"} and reason == "length":
            count = body["max_tokens"]
        usage = {"completion_tokens": count}
        if not stream:
            return plain(200, {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": usage})
        event({"choices": [], "usage": usage})
        event("[DONE]")
        writer.write(b"0\r\n\r\n")


def route(port: int, deadline: str, fault: str) -> None:
    """Two replicas behind the router."""
    from minimegatron.serving import replicas, router

    if fault == "loses requests":  # whom a replica has failed is not asked for elsewhere
        choose = router.choose
        router.choose = lambda r, ring, key, tried: None if tried else choose(r, ring, key, tried)
    if fault == "silent death":

        async def nothing(self, message):
            await self.send({"type": "http.response.body", "body": b""})

        router._Started.end_with = nothing
    if fault == "one works":
        router.choose = lambda all, ring, key, tried: next((r for r in all if r.ready and r.number not in tried), None)

    def command(number, own):
        return [sys.executable, "-m", "tests.course.fake_service", str(own), deadline, "replica", fault]

    replicas.serve(command, 2, "127.0.0.1", port, drain=1)


async def main(port: int, deadline: float, serial: bool, fault: str) -> None:
    replica = Replica(deadline, serial, fault)
    server = await asyncio.start_server(replica.serve, "127.0.0.1", port, backlog=1024)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    await over.wait()
    server.close()


if __name__ == "__main__":
    port, deadline, kind, fault = sys.argv[1:]
    if kind == "router":
        route(int(port), deadline, fault)
    else:
        asyncio.run(main(int(port), float(deadline), kind == "serial", fault))
