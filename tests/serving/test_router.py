"""The router before replicas that are scripts, called as a server calls it (ASGI)."""

import asyncio
import collections
import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minimegatron.cli import main
from minimegatron.commands import serve_replicas
from minimegatron.commands.serve import parse
from minimegatron.commands.serve_replicas import gpus_of, replica_argv
from minimegatron.errors import ConfigError
from minimegatron.launch.procs import children
from minimegatron.serving import router as module
from minimegatron.serving.balance import Replica, Ring, beginning, choose
from minimegatron.serving.http_client import Client, ServerSentEvents
from minimegatron.serving.replicas import Processes, free_ports, serve
from minimegatron.serving.router import Router, merged
from tests.serving.fake import CLOSE, HANG, FakeServer, completion, event, plain, stream

ROOT = Path(__file__).resolve().parents[2]
STREAM = [("content-type", "application/json"), ("authorization", "Bearer k")]


class Answer:
    """What a client gets of a request."""

    def __init__(self):
        self.status, self.headers, self.body, self.over = 0, {}, b"", False
        self.first = asyncio.Event()

    async def send(self, message):
        if message["type"] == "http.response.start":
            assert self.status == 0, "an answer begins once"
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert self.status and not self.over
            self.body += message.get("body", b"")
            self.over = not message.get("more_body", False)
        if self.body:
            self.first.set()


async def ask(router, path="/v1/completions", fields=None, method="POST", leave=None, body=None, query=b""):
    """Ask, and leave when the event `leave(answer)` is set."""
    answer = Answer()
    body = json.dumps(fields).encode() if fields is not None else body or b""
    messages = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:]},
    ]

    async def receive():
        if messages:
            return messages.pop(0)
        await (leave(answer) if leave else asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    headers = [(k.encode(), v.encode()) for k, v in [*STREAM, ("host", "router"), ("content-length", str(len(body)))]]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": query}
    async with asyncio.timeout(60):
        await router(scope, receive, answer.send)
    return answer


def with_replicas(answers, main, **kwargs):
    """Run `main(router, servers)` with a replica for each of `answers`; all are healthy."""

    def script(answer):
        return lambda path, body, n: plain(200, "{}") if path == "/health" else answer(path, body, n)

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(FakeServer(script(answer))) for answer in answers]
            router = Router([server.url for server in servers], **kwargs)
            await asyncio.gather(*map(router.check, router.replicas))
            assert all(replica.ready for replica in router.replicas)
            return await main(router, servers)

    return asyncio.run(run())


def says(*words):
    return lambda path, body, n: stream(*completion(*words))


def prompt_for(number, size=2):
    """A prompt whose place on the circle belongs to a replica."""
    ring = Ring(range(size))
    return next(
        {"prompt": f"p{i}"} for i in range(1000) if ring.order(beginning(b'{"prompt": "p%d"}' % i))[0] == number
    )


def asked(server):
    return [json.loads(body) for method, path, _, body in server.requests if method == "POST"]


# ------------------------------------------------------------------------------------------------- where to


def test_a_key_keeps_its_replica_and_moves_only_when_it_goes():
    keys = [f"prompt {i}".encode() for i in range(3000)]
    four, three = Ring(range(4)), Ring([0, 1, 3])
    counts = collections.Counter(four.order(key)[0] for key in keys)
    assert min(counts.values()) > 500 and len(counts) == 4
    for key in keys:
        order = four.order(key)
        assert sorted(order) == [0, 1, 2, 3]
        assert three.order(key) == [n for n in order if n != 2]


def test_no_replica_has_more_than_its_share_though_all_prompts_begin_alike():
    replicas = [Replica(i, None, ready=True) for i in range(4)]
    ring = Ring(range(4))
    for total in range(1, 101):
        chosen = choose(replicas, ring, b"the same", set())
        chosen.under_way += 1
        assert chosen.under_way <= 1.25 * total / 4 + 1
    first, *_, last = ring.order(b"the same")
    assert replicas[first].under_way > replicas[last].under_way > 0


def test_without_a_key_who_has_least_is_asked_and_nobody_twice():
    replicas = [Replica(0, None, ready=True, under_way=2), Replica(1, None, ready=True), Replica(2, None)]
    ring = Ring(range(3))
    assert choose(replicas, ring, None, set()).number == 1
    assert choose(replicas, ring, None, {1}).number == 0
    assert choose(replicas, ring, b"key", {0, 1}) is None


def test_the_beginning_of_a_prompt_decides():
    def key(**fields):
        return beginning(json.dumps(fields).encode())

    long = "x" * 256
    turn = [{"role": "user", "content": long}]
    assert key(prompt=long + "a") == key(prompt=long + "b", n=3) != key(prompt="y" + long)
    assert key(prompt=[*range(64), 1]) == key(prompt=[*range(64), 2]) != key(prompt=[*range(63), 0])
    assert key(prompt=["one", "two"]) == key(prompt="one") and key(prompt=[[1, 2], [3]]) == key(prompt=[1, 2])
    assert key(messages=turn) == key(messages=[*turn, {"role": "assistant", "content": "a"}])
    assert key(prompt="one", model="a") != key(prompt="one", model="b")
    for nothing in ({}, {"prompt": ""}, {"prompt": 7}, {"prompt": None}):
        assert key(**nothing) is None
    assert beginning(b"{oops") is None and beginning(b"[1]") is None and beginning(b"\xff") is None


# ------------------------------------------------------------------------------------------------- passing on


def test_a_stream_and_an_answer_arrive_as_the_replica_sent_them():
    async def main(router, servers):
        streamed = await ask(router, fields={"prompt": "p", "stream": True}, query=b"a=b")
        whole = await ask(router, "/v1/models", method="GET")
        return streamed, whole, servers[0].requests

    def answer(path, body, n):
        return plain(404, '{"error": 1}', "x-id: 7") if "models" in path else stream(*completion("é", "b"))

    streamed, whole, requests = with_replicas([answer], main)
    assert streamed.status == 200 and streamed.body.decode() == "".join(completion("é", "b")) and streamed.over
    assert streamed.headers["content-type"] == "text/event-stream" and "transfer-encoding" not in streamed.headers
    assert (whole.status, whole.body, whole.headers["x-id"]) == (404, b'{"error": 1}', "7")
    _, path, headers, body = requests[1]
    assert path == "/v1/completions?a=b" and json.loads(body) == {"prompt": "p", "stream": True}
    assert headers["authorization"] == "Bearer k" and headers["host"] != "router"


def test_a_replica_that_dies_before_its_first_byte_is_replaced_unseen():
    async def main(router, servers):
        await servers[1].__aexit__(None)  # nobody listens there any more
        answers = [await ask(router, fields=prompt_for(number)) for number in (0, 1)]
        return answers, router

    for dying in ([CLOSE], stream(end=False) + [CLOSE]):  # before the head, and between head and body
        answers, router = with_replicas([lambda *_, dying=dying: dying, says("a")], lambda r, s: only_first(r, s))
        assert answers.body.decode() == "".join(completion("a")) and answers.status == 200
        assert not router.replicas[0].ready and router.replicas[1].ready and router.retries == 1
    answers, router = with_replicas([says("a"), says("b")], main)
    assert [a.body.decode() for a in answers] == ["".join(completion("a"))] * 2
    assert [r.ready for r in router.replicas] == [True, False] and router.under_way == 0


async def only_first(router, servers):
    return await ask(router, fields=prompt_for(0)), router


def test_a_whole_answer_that_is_cut_is_asked_for_elsewhere():
    cut = [b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"half"', CLOSE]
    answer, _ = with_replicas([lambda *_: cut, lambda *_: plain(200, '{"ok": 1}')], only_first)
    assert (answer.status, answer.body) == (200, b'{"ok": 1}')


def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_done():
    begun = stream(completion("a")[0], 'data: {"choices": [{"te', end=False)
    answer, router = with_replicas([lambda *_: [*begun, CLOSE], says("b")], only_first)
    events = answer.body.decode().strip().split("\n\n")
    assert answer.status == 200 and answer.over and "[DONE]" not in answer.body.decode()
    assert events[0] == completion("a")[0].strip() and "b" not in events[0]
    assert "replica 0 failed" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert router.retries == 0 and not router.replicas[0].ready


def test_a_request_that_kills_two_replicas_kills_no_third():
    async def main(router, servers):
        answer = await ask(router, fields={"prompt": "p"})
        return answer, [len(asked(server)) for server in servers]

    answer, counts = with_replicas([lambda *_: [CLOSE]] * 4, main)
    assert answer.status == 502 and sorted(counts) == [0, 0, 1, 1]


def test_a_full_replica_hands_on_and_when_all_are_full_the_client_hears_it():
    full = lambda path, body, n: plain(429, '{"error": "full"}', "retry-after: 3")  # noqa: E731
    answer, router = with_replicas([full, says("b")], only_first)
    assert answer.status == 200 and router.retries == 1 and all(r.ready for r in router.replicas)
    answer, _ = with_replicas([full, full], only_first)
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b'{"error": "full"}', "3")


def test_a_replica_that_says_nothing_is_given_up_and_not_tried_elsewhere():
    answer, router = with_replicas([lambda *_: [HANG], says("b")], only_first, timeout=0.1)
    assert answer.status == 504 and router.retries == 0 and router.replicas[0].ready


@pytest.mark.parametrize("script", [[HANG], [*stream(completion("a")[0], end=False), HANG]], ids=["before", "within"])
def test_a_client_that_goes_takes_its_request_with_it(script):
    async def main(router, servers):
        def leave(answer):
            return answer.first if len(script) > 1 else arrived

        arrived = asyncio.Event()
        asking = asyncio.create_task(ask(router, fields={"prompt": "p"}, leave=leave))
        while not asked(servers[0]):
            await asyncio.sleep(0.001)
        arrived.set()
        await asking
        async with asyncio.timeout(60):
            await servers[0].gone.wait()
        return router.under_way

    assert with_replicas([lambda *_: script], main) == 0


def test_what_the_router_refuses_itself(monkeypatch):
    monkeypatch.setattr(module, "MAX_BODY", 100)

    async def main(router, servers):
        large = await ask(router, body=b"x" * 101)
        router.draining = True
        draining = [await ask(router, fields={"prompt": "p"}), await ask(router, "/health", method="GET")]
        router.draining = False
        router.lost(router.replicas[0], "a test")
        gone = [await ask(router, fields={"prompt": "p"}), await ask(router, "/health", method="GET")]
        return large, draining, gone, asked(servers[0])

    large, draining, gone, seen = with_replicas([says("a")], main)
    assert large.status == 413 and [a.status for a in draining + gone] == [503] * 4 and not seen
    assert "shutting down" in draining[0].body.decode() and "no replica is ready" in gone[0].body.decode()
    assert draining[0].headers["retry-after"] and gone[0].headers["retry-after"]


# --------------------------------------------------------------------------------------- health, metrics, processes


def test_health_comes_and_goes_and_is_logged_once(caplog):
    caplog.set_level(logging.INFO, module.__name__)
    state = {"status": 503}

    async def main():
        async with FakeServer(lambda *_: plain(state["status"], "{}")) as server:
            router = Router([server.url])
            for status in (503, 200, 200, 500, 500, 200):
                state["status"] = status
                await router.check(router.replicas[0])
                assert router.replicas[0].ready == (status == 200)
            answer = await ask(router, "/health", method="GET")
            told = json.loads(answer.body)["replicas"]
            assert (answer.status, told) == (200, [{"engine": 0, "state": "ready", "under_way": 0, "deaths": 0}])

    asyncio.run(main())
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "answers 500" in caplog.text


def test_metrics_of_all_replicas_are_one_exposition():
    prometheus = pytest.importorskip("prometheus_client")
    parse = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families
    texts = []
    for labels, value in ((["model_name"], 3), (["engine", "model_name"], 4)):  # a replica may name an engine itself
        registry = prometheus.CollectorRegistry()
        given = dict.fromkeys(labels, 'a,b} "c"\\')
        prometheus.Counter("vllm:req", "Requests.", labels, registry=registry).labels(**given).inc(value)
        prometheus.Histogram("vllm:wait", "Seconds.", registry=registry, buckets=(1, 2)).observe(1.5)
        texts.append(prometheus.generate_latest(registry).decode())
    text = merged([(0, texts[0]), (2, texts[1])])
    families = {family.name: family for family in parse(text)}
    assert text.count("# TYPE vllm:req_total ") == 1 and len(list(parse(text))) == len(families)
    samples = {s.labels["engine"]: s for s in families["vllm:req"].samples if s.name.endswith("_total")}
    assert {n: s.value for n, s in samples.items()} == {"0": 3, "2": 4}
    assert {s.labels["model_name"] for s in samples.values()} == {'a,b} "c"\\'}
    buckets = [s for s in families["vllm:wait"].samples if s.name.endswith("_bucket")]
    assert sorted((s.labels["engine"], s.labels["le"], s.value) for s in buckets) == [
        (engine, le, count) for engine in ("0", "2") for le, count in (("+Inf", 1), ("1.0", 0), ("2.0", 1))
    ]


def test_metrics_pass_the_key_on_and_count_what_the_router_did():
    async def main(router, servers):
        await ask(router, fields=prompt_for(0))
        answer = await ask(router, "/metrics", method="GET")
        return answer.body.decode(), servers[1].requests[-1][2]["authorization"]

    def replica(path, body, n):
        return plain(200, "up 1\n", kind="text/plain") if path == "/metrics" else plain(429, "{}")

    text, key = with_replicas([replica, replica], main)
    assert key == "Bearer k" and 'up{engine="0"} 1' in text and 'up{engine="1"} 1' in text
    assert "router_retries_total 1" in text and 'router_requests_total{engine="0"} 0' in text


def test_a_process_that_dies_is_started_again_and_in_the_end_left_out(caplog, tmp_path):
    caplog.set_level(logging.INFO, "minimegatron.serving")
    router = Router(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    program = f"echo $0 >> {tmp_path}/starts; exit 3"
    processes = Processes(router, lambda number, port: ["/bin/sh", "-c", program, f"{number}:{port}"], backoff=0.001)
    asyncio.run(processes.keep(router.replicas[1]))
    assert (tmp_path / "starts").read_text().split() == ["1:2"] * 5
    assert router.replicas[1].left_out and router.replicas[1].deaths == 5 and not router.replicas[0].left_out
    assert caplog.text.count("is started again") == 4 and "replica 1 is left out" in caplog.text
    assert "left with exit status 3" in caplog.text


def test_processes_that_do_not_end_are_killed():
    router = Router(["http://127.0.0.1:1"])
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )

    async def main():
        processes = Processes(router, lambda number, port: [sys.executable, "-c", deaf])
        keeping = asyncio.create_task(processes.keep(router.replicas[0]))
        while not processes.running:
            await asyncio.sleep(0.001)
        keeping.cancel()
        processes.end(seconds=0.3)
        return processes.running[0].returncode

    assert asyncio.run(main()) in (-9, -15)  # -15 where it had not come to ignoring the signal


def test_a_process_that_says_nothing_is_killed_and_started_again(caplog):
    caplog.set_level(logging.INFO, "minimegatron.serving")
    router = Router(["http://127.0.0.1:1"])
    replica = router.replicas[0]

    async def main():
        processes = Processes(router, lambda number, port: ["/bin/sleep", "600"], backoff=0.001, hung=30)
        keeping = asyncio.create_task(processes.keep(replica))
        await asyncio.sleep(0.5)
        first = processes.running[0]
        assert first.poll() is None, "one that has never answered may still load its weights"
        replica.answered = asyncio.get_running_loop().time() - 31

        async def again():
            return processes.running[0] is not first

        await until(again)
        assert replica.deaths == 1 and replica.answered == math.inf
        keeping.cancel()
        processes.end(seconds=5)

    asyncio.run(main())
    assert "killed by SIGKILL after 30 s without an answer to GET /health" in caplog.text


def test_what_counts_as_an_answer_to_health(caplog):
    async def seen(script):
        async with FakeServer(lambda *_: script) as server:
            router = Router([server.url], health_timeout=0.2)
            replica = router.replicas[0]
            replica.ready = True
            await router.check(replica)
            return replica.ready, replica.answered < math.inf

    assert asyncio.run(seen(plain(200, "{}"))) == (True, True)
    assert asyncio.run(seen(plain(503, "{}"))) == (False, True), "it lives, and wants no requests"
    assert asyncio.run(seen([HANG])) == asyncio.run(seen([CLOSE])) == (False, False)
    assert "is not ready: GET /health answers 503" in caplog.text and "GET /health: TimeoutError" in caplog.text


def test_an_event_is_what_clients_take_for_an_error():
    openai = pytest.importorskip("openai")
    answer, _ = with_replicas([lambda *_: [*stream(event({"choices": []}), end=False), CLOSE]], only_first_of_one)
    decoder = openai._streaming.SSEDecoder()
    events = [json.loads(sse.data) for sse in decoder.iter_bytes(iter([answer.body]))]
    assert events[0] == {"choices": []} and events[-1]["error"]["message"]


async def only_first_of_one(router, servers):
    return await ask(router, fields={"prompt": "p"}), router


# ------------------------------------------------------------------------------------------------- all together

SERVE = """
import logging, sys
from minimegatron.serving.replicas import serve
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
serve(lambda number, port: [sys.executable, "-m", "tests.serving.replica", str(port), str(number)], 2, "127.0.0.1",
      int(sys.argv[1]))
"""


async def said(client, fields):
    """The texts of a stream, and the message of its error."""
    texts, errors, events = [], [], ServerSentEvents()
    async with client.request("POST", "/v1/completions", json.dumps(fields).encode()) as response:
        assert response.status == 200, await response.read()
        async for _, piece in response.pieces():
            for data in events.feed(piece):
                if data != "[DONE]":
                    found = json.loads(data)
                    texts += [choice["text"] for choice in found.get("choices", ())]
                    errors += [found["error"]["message"]] if "error" in found else []
                yield texts, errors


async def until(condition):
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.05)


def test_two_processes_one_of_which_dies_and_comes_back(tmp_path):
    pytest.importorskip("uvicorn")
    (port,) = free_ports(1)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", SERVE, str(port)], stdout=log, stderr=log, cwd=ROOT)

    async def main():
        client = Client(f"http://127.0.0.1:{port}", reuse=False)

        async def health():
            try:
                async with client.request("GET", "/health") as response:
                    return [r["state"] for r in json.loads(await response.read())["replicas"]]
            except OSError:
                return []

        async def all_ready():
            return await health() == ["ready", "ready"]

        await until(all_ready)
        slow = said(client, {"prompt": "slow"})
        texts, errors = await anext(slow)
        number = int(texts[0])
        async with client.request("GET", "/metrics") as response:
            assert f'router_requests_under_way{{engine="{number}"}} 1' in (await response.read()).decode()
        os.kill(pid_of(server.pid, number), signal.SIGKILL)
        async for texts, errors in slow:  # noqa: B007
            pass
        assert "replica" in errors[0]
        async for texts, _ in said(client, prompt_for(number)):  # noqa: B007
            pass
        assert texts[:1] == [str(1 - number)]  # the other answers for it
        await until(all_ready)
        async for texts, _ in said(client, prompt_for(number)):  # noqa: B007
            pass
        assert texts[:1] == [str(number)]  # and it is back

        async def over():
            return server.poll() is not None

        server.send_signal(signal.SIGTERM)
        await until(over)

    try:
        asyncio.run(main())
    finally:
        server.kill()
        server.wait(30)
    told = (tmp_path / "log").read_text()
    assert server.returncode == 0, told
    assert "was killed by SIGKILL" in told and "is started again" in told


def pid_of(parent, number):
    """The process of a replica."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children(parent)}
    return next(pid for pid, line in lines.items() if line[-2:] == [str(number), ""])


def test_the_command_line_of_a_replica():
    argv = ["model", "--host", "0.0.0.0", "--api-key", "k", "--data-par", "2", "--port=80", "--max-num-seqs", "4"]
    line = replica_argv(argv, 81, 1)
    assert line[:4] == [sys.executable, "-m", "minimegatron", "serve"]
    args = parse(line[4:])
    assert (args.data_parallel_size, args.host, args.port, args.max_num_seqs) == (1, "127.0.0.1", 81, 4)
    two = replica_argv(argv, 81, 2)
    assert two[3:9] == ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "minimegatron"]
    assert two[9:] == line[3:]
    assert gpus_of(1, 2, ["0", "1", "GPU-x", "5"]) == {"CUDA_VISIBLE_DEVICES": "GPU-x,5"} and gpus_of(1, 2, []) == {}


def test_replicas_that_cannot_be(monkeypatch, capsys):
    line = ["serve", "model", "--data-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    monkeypatch.setattr(serve_replicas, "visible_gpus", lambda: ["0", "1", "2"])
    assert main(line) == 2 and "3 GPUs for 2 replicas of 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(line) == 2 and "under torchrun" in capsys.readouterr().err
    assert main([*line, "--data-parallel-size", "0"]) == 2


def test_an_address_that_is_taken():
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot be served"):
        serve(lambda number, port: ["/bin/false"], 2, "127.0.0.1", taken.getsockname()[1])
