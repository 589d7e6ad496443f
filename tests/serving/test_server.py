"""Who may ask, how much, and how it ends: clients that leave, too many, wrong ones, errors, and the end."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import resource
import socket
import threading
import time
from random import Random

import httpx
import openai
import pytest

from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.speculative import SpeculativeConfig
from minimegatron.serving import http_server
from minimegatron.serving.app import PAGE, Server
from minimegatron.serving.protocol import REFUSED
from tests.inference.models import ours
from tests.serving.conftest import KEY, running
from tests.serving.waiting import wait_until

JSON = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
PROMPT = {"model": "tiny", "prompt": "HELLO", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "WHO"}], "max_tokens": 2}


def post(server, body, path="/v1/completions", headers=JSON):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=raw, headers=headers, timeout=30)


def error_of(response):
    """OpenAI's form of an error."""
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


class Gate:
    """The engine's steps wait at it."""

    def __init__(self, engine, monkeypatch):
        self.opened, self.steps = threading.Event(), 0
        step = engine.step

        def wait_and_step():
            self.steps += 1
            assert self.opened.wait(30)
            return step()

        monkeypatch.setattr(engine, "step", wait_and_step)


def send(server, body, path="/v1/completions"):
    """A connection that has asked and reads nothing yet."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, json.dumps(body), JSON)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_vanish_leave_nothing(tiny, monkeypatch, stream):
    """Queued, before their prompt is read, and while they generate."""
    engine, blocks = tiny.engine, tiny.engine.scheduler.blocks
    gate, open_answers = Gate(engine, monkeypatch), lambda: tiny.service.thread._open
    long = {**PROMPT, "max_tokens": 55, "stream": stream, "ignore_eos": True}
    clients = [send(tiny, long) for _ in range(6)]  # four seats
    wait_until(lambda: open_answers() == 6 and gate.steps)
    for client in clients[:1] + clients[4:]:
        client.close()
    wait_until(lambda: open_answers() == 3)
    gate.opened.set()
    wait_until(lambda: len(engine.scheduler.running) == 3)
    assert blocks.available < 64
    for client in clients:
        client.close()
    wait_until(lambda: open_answers() == 0 and not engine.has_work and blocks.available == 64)
    assert engine.sequences == {} and tiny.service.thread._active == {}
    assert post(tiny, PROMPT).status_code == 200


def test_a_stream_that_is_closed_between_the_last_token_and_done(tiny):
    stream = tiny.openai.completions.create(prompt="HI", model="tiny", max_tokens=3, stream=True)
    for chunk in stream:
        if chunk.choices[0].finish_reason:
            break
    stream.close()
    wait_until(lambda: tiny.service.thread.idle and tiny.engine.scheduler.blocks.available == 64)


def test_too_many_are_told_when_to_come_again(tiny, monkeypatch):
    gate = Gate(tiny.engine, monkeypatch)
    clients = [send(tiny, PROMPT) for _ in range(8)]  # four seats, and four that wait
    wait_until(lambda: tiny.service.thread._open == 8)
    with pytest.raises(openai.RateLimitError) as refused:
        tiny.openai.completions.create(**PROMPT)
    assert int(refused.value.response.headers["retry-after"]) >= 1 and refused.value.code == "rate_limit_exceeded"
    batch = post(tiny, {**PROMPT, "prompt": ["A", "B"]})
    assert batch.status_code == 429 and tiny.service.thread._open == 8
    gate.opened.set()
    assert [client.getresponse().status for client in clients] == [200] * 8
    for client in clients:
        client.close()
    assert post(tiny, PROMPT).status_code == 200


def test_every_route_wants_the_key(tiny):
    routes = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/metrics", "/nothing", "//"]
    client = httpx.Client()
    for path in routes:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            for header in (
                {},
                {"Authorization": "Bearer other"},
                {"Authorization": KEY},
                {"Authorization": "Bearer é"},
            ):
                raw = [(name.encode(), value.encode("latin-1")) for name, value in header.items()]
                answer = client.request(method, tiny.url + path, headers=raw)
                assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
    client.close()
    assert httpx.get(tiny.url + "/health").json() == {"status": "ok"}
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="other", max_retries=0).models.list()
    assert error_of(httpx.get(tiny.url + "/nothing", headers=JSON))["type"] == "invalid_request_error"
    assert httpx.get(tiny.url + "/v1/completions", headers=JSON).status_code == 405


def test_the_models(tiny):
    (model,) = tiny.openai.models.list().data
    assert model.id == tiny.openai.models.retrieve("tiny").id == "tiny" and model.max_model_len == 64
    for call in (lambda: tiny.openai.models.retrieve("big/one"), lambda: post_as_client(tiny, model="big/one")):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "model_not_found"


def post_as_client(tiny, **more):
    return tiny.openai.completions.create(**{**PROMPT, **more})


HUGE = 10**30
WRONG = {
    "temperature": [-0.1, 2.1, "1", True, HUGE, [1]],
    "top_p": [-0.1, 1.1, "1", True],
    "n": [0, 129, 1.5, "1", True, HUGE, 5],
    "max_tokens": [-1, 1.5, "2", True, HUGE, 1000],
    "stop": ["", [""], 5, [5], ["a"] * 17, "a" * 1025],
    "seed": [1.5, "1", True, HUGE],
    "presence_penalty": [-2.1, 2.1, "1"],
    "frequency_penalty": [-2.1, 2.1, True],
    "logit_bias": [{"99": 1}, {"-1": 1}, {"a": 1}, {"5": 101}, {"5": "1"}, [5], {"٥": 1}],
    "stream": [1, "true"],
    "stream_options": [{}, {"include_usage": True}, {"other": 1}, 5],
    "min_tokens": [-1, 3],
    "stop_token_ids": [[-1], [99], ["a"], 5],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, "1"],
    "cache_salt": ["", 5],
    "unknown": [1, None],
}
OF_COMPLETIONS = {
    "prompt": [None, 5, [], [[]], [5, "a"], [99], [-1], [True], {"a": 1}, "A" * 63, ["A"] * 9, "\ud800"],
    "best_of": [0, 129],
    "echo": [1],
    "logprobs": [-1, 21, True],
    "max_tokens": [0],
    "messages": [[]],
}
OF_CHATS = {
    "messages": [None, [], "a", [{}], [{"role": "tool", "content": "a"}], [{"role": "user", "content": None}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
                 [{"role": "assistant", "content": "a", "tool_calls": []}], [{"role": "user", "content": "A" * 99}]],
    "logprobs": [1, 5],
    "top_logprobs": [-1, 21, 1],
    "max_tokens": [0],
    "max_completion_tokens": [0, 3, 1000],
    "prompt": ["a"],
}  # fmt: skip


ALSO_CALLED = {"max_completion_tokens": ("max_tokens",)}


@pytest.mark.parametrize(
    "path, body, more", [("/v1/completions", PROMPT, OF_COMPLETIONS), ("/v1/chat/completions", CHAT, OF_CHATS)]
)
def test_every_wrong_value_is_refused_by_name(tiny, path, body, more):
    cases = [(name, value) for table in (WRONG, more) for name, values in table.items() for value in values]
    asks_for_something = {"tool_choice": "required", "response_format": {"type": "json_object"}, "store": True}
    cases += [(name, asks_for_something.get(name, "x")) for name in REFUSED]
    with httpx.Client(headers=JSON) as client:
        for name, value in cases:
            answer = client.post(tiny.url + path, content=json.dumps({**body, name: value}))
            assert answer.status_code == 400, (name, value, answer.text)
            error = error_of(answer)
            assert (error["param"] or "").split(".")[0] in (name, *ALSO_CALLED.get(name, ())), (name, value, error)
        for name, (nothing, _) in REFUSED.items():
            for value in nothing:
                answer = client.post(tiny.url + path, content=json.dumps({**body, name: value}))
                assert answer.status_code == 200, (name, answer.text)
    assert "did you mean `temperature`" in error_of(post(tiny, {**body, "temprature": 1}, path))["message"]


BODIES = [
    (b"", 400), (b"[]", 400), (b"null", 400), (b'{"prompt": "a"', 400), (b"[" * 100_000, 400),
    (b'{"a":' * 100_000, 400), (b'{"prompt": "a", "prompt": "b"}', 400), (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "a", "temperature": NaN}', 400), (b'{"prompt": "a", "top_p": Infinity}', 400),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400), (b'{"prompt": "' + b"a" * (4 << 20) + b'"}', 413),
]  # fmt: skip


def test_bodies_that_are_no_requests(tiny):
    for raw, status in BODIES:
        answer = post(tiny, raw)
        assert answer.status_code == status, (raw[:40], answer.text[:200])
        error_of(answer)
    plain = {"Authorization": f"Bearer {KEY}", "Content-Type": "text/plain"}
    assert post(tiny, PROMPT, headers=plain).status_code == 415
    assert post(tiny, PROMPT, headers={**JSON, "Content-Encoding": "gzip"}).status_code == 415
    parts = httpx.post(tiny.url + "/v1/completions", content=iter([b'{"prompt"', b': "A"}']), headers=JSON)
    assert parts.status_code == 200, "chunked"


def test_an_error_of_the_engine_ends_its_requests_and_not_the_server(tiny, monkeypatch):
    run = tiny.engine.runner.run

    def fail(batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tiny.engine.runner, "run", fail)
    for _ in range(3):
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            post_as_client(tiny)
    answer = httpx.get(tiny.url + "/health")
    assert answer.status_code == 503 and "failing" in answer.json()["status"]
    lines = post(tiny, {**PROMPT, "stream": True}).text.strip().split("\n\n")
    assert len(lines) == 1 and "out of memory" in json.loads(lines[0].removeprefix("data: "))["error"]["message"]

    def infinite(batch):
        result = run(batch)
        result.finite[0] = False
        return result

    monkeypatch.setattr(tiny.engine.runner, "run", infinite)
    with pytest.raises(openai.InternalServerError, match="not finite"):
        post_as_client(tiny)
    monkeypatch.undo()
    assert post_as_client(tiny).choices[0].text and tiny.service.health().status_code == 200
    assert tiny.engine.scheduler.blocks.available == 64


def test_a_request_has_a_deadline(tiny, monkeypatch):
    monkeypatch.setattr(tiny.service.thread, "request_seconds", 0.0)
    answer = post(tiny, PROMPT)
    assert answer.status_code == 504 and error_of(answer)["code"] == "timeout"
    wait_until(lambda: tiny.engine.scheduler.blocks.available == 64)


def test_metrics_have_vllms_names(tiny):
    def read():
        text = httpx.get(tiny.url + "/metrics", headers=JSON).text
        found = re.findall(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", text, re.M)
        return {(name, *re.findall(r'finished_reason="(\w+)"', labels)): float(value) for name, labels, value in found}

    before = read()
    for _ in range(2):
        post_as_client(tiny, prompt="C" * 20, max_tokens=5, extra_body={"ignore_eos": True})
    tiny.openai.completions.create(model="tiny", prompt="C", max_tokens=2, logit_bias={"95": 100})
    wait_until(lambda: tiny.service.thread.idle)
    grown = {name: value - before.get(name, 0) for name, value in read().items()}
    for name, count in (
        ("prompt_tokens_total", 44), ("generation_tokens_total", 11), ("num_preemptions_total", 0),
        ("prefix_cache_queries_total", 44), ("prefix_cache_hits_total", 20), ("time_to_first_token_seconds_count", 3),
        ("inter_token_latency_seconds_count", 8), ("e2e_request_latency_seconds_count", 3),
        ("request_prompt_tokens_sum", 44), ("request_generation_tokens_sum", 11),
        ("request_time_per_output_token_seconds_count", 2), ("spec_decode_num_drafts_total", 0),
    ):  # fmt: skip
        assert grown[(f"vllm:{name}",)] == count, name
    assert grown["vllm:request_success_total", "length"] == 2 and grown["vllm:request_success_total", "stop"] == 1
    now = read()
    assert [now[(f"vllm:{name}",)] for name in ("num_requests_running", "num_requests_waiting")] == [0, 0]
    assert now[("vllm:kv_cache_usage_perc",)] == 0


def test_proposals_are_counted_under_vllms_names(tokenizer):
    config = EngineConfig(64, page_size=4, max_num_seqs=4, speculative=SpeculativeConfig("draft_model", 3))
    with running(tokenizer, engine=Engine(ours("llama2"), config, draft=ours("llama2"))) as server:
        post_as_client(server, max_tokens=9, extra_body={"ignore_eos": True})
        text = httpx.get(server.url + "/metrics", headers=JSON).text
    found = dict(re.findall(r'^vllm:spec_decode_(\w+)\{model_name="tiny"(.*)$', text, re.M))
    assert {name: float(rest.split("} ")[1]) for name, rest in found.items() if "per_pos" not in name} == {
        "num_drafts_total": 2, "num_draft_tokens_total": 6, "num_accepted_tokens_total": 6
    }  # fmt: skip
    positions = re.findall(r'per_pos_total\{model_name="tiny",position="(\d)"\} (\S+)$', text, re.M)
    assert positions == [("0", "2.0"), ("1", "2.0"), ("2", "2.0")]


def test_the_addresses_that_are_printed_are_answered(tiny, monkeypatch, capsys):
    server = Server(tiny.service, port=0)
    monkeypatch.setattr(server, "run", lambda sockets: None)
    server.run_until_signal()
    page, api = re.findall(r"http://127.0.0.1:\d+(/\S*)", capsys.readouterr().err)
    assert httpx.get(tiny.url + page).text == PAGE.read_text()
    assert httpx.get(f"{tiny.url}{api}/models", headers=JSON).status_code == 200


def test_the_page_needs_nothing_from_elsewhere(tiny):
    answer = httpx.get(tiny.url + "/")
    assert answer.status_code == 200 and answer.text == PAGE.read_text()
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|src=|href=|@import|innerHTML", answer.text)


def test_the_end_waits_for_those_under_way(tokenizer, monkeypatch):
    engine = Engine(ours("llama2"), EngineConfig(max_model_len=64, page_size=4, max_num_seqs=4))
    with running(tokenizer, engine=engine) as server:
        gate = Gate(engine, monkeypatch)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(post, server, {**PROMPT, "stream": stream}) for stream in (True, False)]
            wait_until(lambda: server.service.thread._open == 2)
            server.server.handle_exit(15)
            late = post(server, PROMPT)
            assert late.status_code == 503 and "retry-after" in late.headers
            assert httpx.get(server.url + "/health").json() == {"status": "draining"}
            gate.opened.set()
            streamed, whole = (answer.result(30) for answer in answers)
        assert streamed.text.endswith("data: [DONE]\n\n") and whole.json()["choices"][0]["text"]
        server.thread.join(20)
        assert not server.thread.is_alive() and server.server._captured_signals == []


@pytest.mark.parametrize("signals", [1, 2], ids=["after a while", "by a second signal"])
def test_the_end_does_not_wait_for_ever(tokenizer, monkeypatch, signals):
    engine = Engine(ours("llama2"), EngineConfig(max_model_len=64, page_size=4, max_num_seqs=4))
    with running(tokenizer, engine=engine, drain_seconds=0.1 if signals == 1 else 60) as server:
        gate = Gate(engine, monkeypatch)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, server, {**PROMPT, "stream": True, "max_tokens": 50, "ignore_eos": True})
            wait_until(lambda: server.service.thread._open == 1 and gate.steps)
            for _ in range(signals):
                server.server.handle_exit(15)
            wait_until(lambda: server.server.should_exit)
            gate.opened.set()
            if signals == 1:
                assert "shutting down" in answer.result(30).text
            else:
                server.service.close()
                assert answer.exception(30) or "[DONE]" not in answer.result().text
        server.thread.join(20)
        assert not server.thread.is_alive()


def whole_answer(connection):
    """Of /health: its head and its body, which may come one by one."""
    read = b""
    while not read.endswith(b"}"):
        read += connection.recv(1 << 16)
    return read


def test_a_head_that_does_not_come_is_not_waited_for(tiny, monkeypatch):
    """Nothing, a half, and a half after a request that was answered."""
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.3)
    half = b"GET /health HTTP/1.1\r\nHost: here\r\n"
    made = [socket.create_connection(("127.0.0.1", tiny.port), timeout=20) for _ in range(4)]
    made[1].sendall(half)
    for again in made[2:]:
        again.sendall(half + b"\r\n")
        assert whole_answer(again).startswith(b"HTTP/1.1 200")
    made[2].sendall(half)
    assert [connection.recv(1 << 16) for connection in made[:3]] == [b""] * 3  # raises where it is not closed in time
    made[3].sendall(half + b"\r\n")
    assert whole_answer(made[3]).startswith(b"HTTP/1.1 200"), "one that is used again and is quick enough"
    slow = send(tiny, {**PROMPT, "max_tokens": 40, "ignore_eos": True})
    gate = Gate(tiny.engine, monkeypatch)
    time.sleep(0.4)  # longer than a head may take: an answer may take longer
    gate.opened.set()
    assert slow.getresponse().status == 200
    for connection in (*made, slow):
        connection.close()


def test_a_server_has_files_for_more_connections_than_a_shell_allows():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
        http_server.allow_files()
        most = http_server.FILES if hard == resource.RLIM_INFINITY else min(http_server.FILES, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        http_server.allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.thorough
def test_two_hundred_clients_vanish_at_any_moment(tokenizer):
    engine = Engine(ours("llama2"), EngineConfig(max_model_len=64, page_size=4, max_num_seqs=8, num_pages=40))
    random = Random(0)
    with running(tokenizer, engine=engine, max_queue=300) as server:
        for _ in range(20):
            body = {**PROMPT, "max_tokens": 50, "n": 2, "ignore_eos": True}
            clients = [send(server, {**body, "stream": random.random() < 0.7}) for _ in range(10)]
            for client in random.sample(clients, 10):
                time.sleep(random.random() * 0.02)
                client.close()
            free = lambda: server.service.thread.idle and engine.scheduler.blocks.available == 40  # noqa: E731
            wait_until(free, seconds=2.0)
        together = [send(server, {**PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True}) for _ in range(200)]
        wait_until(lambda: server.service.thread._open == 200)
        for client in together:
            client.close()
        wait_until(free, seconds=2.0)
        engine.scheduler.blocks.check([])
        assert engine.sequences == {} and post(server, PROMPT).status_code == 200
