"""The load generator: its schedule on a virtual clock, its statistics on written records, its client on a server."""

import asyncio
import json
import math

import numpy as np
import pytest

from minimegatron.errors import ConfigError, DataError
from minimegatron.serving.http_client import Client, ServerSentEvents
from minimegatron.serving.load import Record, Sender, goodput_deadlines, run, summarise
from minimegatron.serving.workload import Prompt, arrivals, drawn, random_prompts, read
from tests.serving.fake import CLOSE, HANG, FakeServer, completion, event, on_virtual_clock, plain, stream


def simulated(service, times, limit=None):
    """(begun, sent, done) of each request to a server that needs `service[i]` seconds for request i."""

    async def send(number, record):
        loop = asyncio.get_running_loop()
        record.sent = loop.time()
        await asyncio.sleep(service[number])
        record.done = loop.time()

    records = on_virtual_clock(run(send, times, limit))
    return [(round(r.begun, 6), round(r.sent, 6), round(r.done, 6)) for r in records]


def test_an_open_loop_sends_at_the_arrivals_whoever_waits():
    assert simulated([5, 1, 1], [0, 1, 1.5]) == [(0, 0, 5), (1, 1, 2), (1.5, 1.5, 2.5)]


def test_a_late_request_of_an_open_loop_counts_from_its_planned_arrival():
    """The server stalls for 5 s at one request a second: four users wait, and none of them is left out."""
    seen = simulated([5, 0.5, 0.5, 0.5], [0, 1, 2, 3], limit=1)
    assert seen == [(0, 0, 5), (1, 5, 5.5), (2, 5.5, 6), (3, 6, 6.5)]


def test_users_of_a_closed_loop_send_when_they_have_their_answer():
    assert simulated([1, 2, 1, 1], [0] * 4, limit=2) == [(0, 0, 1), (0, 0, 2), (1, 1, 2), (2, 2, 3)]


def test_all_at_once_without_a_limit():
    assert simulated([1, 2], [0, 0]) == [(0, 0, 1), (0, 0, 2)]


def test_statistics_of_written_records():
    records = [
        Record(10.0, 10.0, [10.1, 10.2, 10.4], 10.4, prompt_tokens=7, output_tokens=3),
        Record(11.0, 11.5, [11.8], 12.0, prompt_tokens=5, output_tokens=1, counted=True),
        Record(11.0, 11.0, [11.1], 14.0, error="disconnected", detail="gone"),
        Record(12.0, 12.0, [], 12.5, error="HTTP 429", detail="full"),
        Record(12.0, 12.0, [], 13.0, error="HTTP 429", detail="still full"),
    ]
    s = summarise(records, {"ttft": 0.5, "tpot": 0.2})
    assert (s["duration"], s["completed"], s["failed"], s["counted_by_pieces"]) == (4.0, 2, 3, 1)
    assert s["errors"] == {
        "disconnected": {"count": 1, "first": "gone"},
        "HTTP 429": {"count": 2, "first": "full"},
    }
    assert (s["request_throughput"], s["output_throughput"], s["total_token_throughput"]) == (0.5, 1.0, 4.0)
    assert (s["request_goodput"], s["goodput_share"]) == (0.25, 0.2)  # the second's first token came after 0.8 s
    for name, values in {"ttft": [100, 800], "tpot": [150], "itl": [100, 200], "e2el": [400, 1000]}.items():
        assert s[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        for p in (50, 95, 99):
            assert s[f"p{p}_{name}_ms"] == pytest.approx(np.percentile(values, p))
    assert s["max_late_ms"] == pytest.approx(500) and s["max_concurrent"] == 3
    json.dumps(s, allow_nan=False)


def test_without_an_answer_there_are_no_figures_but_the_errors():
    s = summarise([Record(1.0, 1.0, [], 1.0, error="connect", detail="refused")], {"ttft": 1.0})
    assert s["mean_ttft_ms"] is None and s["request_throughput"] is None and s["errors"]["connect"]["count"] == 1
    assert summarise([])["completed"] == 0


def test_goodput_deadlines_are_milliseconds():
    assert goodput_deadlines(["ttft:500", "e2el:2000.5"]) == {"ttft": 0.5, "e2el": 2.0005}
    for word in ("ttft", "itl:5", "ttft:x", "ttft:-1", "ttft:nan", "tpot:inf"):
        with pytest.raises(ConfigError, match="--goodput"):
            goodput_deadlines([word])


# ---------------------------------------------------------------------------------------------- a real server

ANSWERS = {
    "ok": stream(*completion("a", "b", "c")),
    "no usage": stream(*completion("a", "b", usage=None)),
    "two tokens a piece": stream(*completion("a b", "c d", usage=(3, 4))),
    "ended at once": stream(*completion(usage=(3, 1))),
    "full": plain(429, '{"error": {"message": "the queue is full"}}'),
    "cut": [*stream(*completion("a", "b")[:1], end=False), CLOSE],
    "closed": [CLOSE],
    "hangs": [*stream(*completion("a")[:1], end=False), HANG],
    "error inside": stream(completion("a")[0], event({"error": {"message": "out of pages"}}), event("[DONE]")),
    "no json": stream("data: {oops\n\n"),
    "not a stream": plain(200, "{}"),
    "not HTTP": [b"SSH-2.0-OpenSSH\r\n\r\n", CLOSE],
    "without done": stream(*completion("a")[:-1]),
    "without tokens": stream(event("[DONE]")),
}
KINDS = {
    "full": "HTTP 429",
    "cut": "disconnected",
    "closed": "disconnected",
    "hangs": "deadline",
    "error inside": "error in the stream",
    "no json": "malformed",
    "not a stream": "malformed",
    "not HTTP": "malformed",
    "without done": "no [DONE]",
    "without tokens": "empty",
}
TOKENS = {"ok": (3, 3, 3), "no usage": (0, 2, 2), "two tokens a piece": (3, 4, 2), "ended at once": (3, 1, 1)}


def test_every_kind_of_answer_is_told_apart():
    async def main():
        async with FakeServer(lambda path, body, n: ANSWERS[body["prompt"]]) as server:
            client, records = Client(server.url), {}
            for name in ANSWERS:
                seconds = 0.1 if name == "hangs" else 100.0
                send = Sender(client, "/v1/completions", [Prompt(name)], {"max_tokens": 5}, timeout=seconds)
                (records[name],) = await run(send, [0.0])
            async with asyncio.timeout(60):
                await server.gone.wait()  # the one that hung was let go
        return records

    by_name = asyncio.run(main())
    assert {name: record.error for name, record in by_name.items() if record.error} == KINDS
    for name, (prompt, output, pieces) in TOKENS.items():
        record = by_name[name]
        assert (record.prompt_tokens, record.output_tokens, len(record.tokens_at)) == (prompt, output, pieces), name
        assert record.counted == (name == "no usage")
    for record in by_name.values():
        moments = [record.begun, record.sent, *record.tokens_at, record.done]
        assert moments == sorted(moments) and not math.isnan(moments[-1])
    assert "queue is full" in by_name["full"].detail and "out of pages" in by_name["error inside"].detail


def test_a_server_that_is_not_there():
    async def main():
        async with FakeServer(lambda *_: [CLOSE]) as server:
            url = server.url
        return await run(Sender(Client(url), "/v1/completions", [Prompt("x")], {}), [0.0])

    (record,) = asyncio.run(main())
    assert record.error == "connect"


def test_what_is_sent_and_over_how_many_connections():
    async def main():
        async with FakeServer(lambda *_: stream(*completion("a"))) as server:
            client = Client(server.url + "/base/", [("authorization", "Bearer k")])
            prompts = [Prompt("hello", 7), Prompt([{"role": "system", "content": "be brief"}])]
            send = Sender(client, "/v1/chat/completions", prompts, {"model": "m", "max_tokens": 5}, seed=3)
            await run(send, [0.0] * 2, max_concurrency=1)
            client.close()
        return server

    server = asyncio.run(main())
    assert server.connections == 1
    bodies = [json.loads(body) for *_, body in server.requests]
    assert [(body["max_tokens"], body["seed"], body["model"]) for body in bodies] == [(7, 3, "m"), (5, 4, "m")]
    assert bodies[0]["messages"] == [{"role": "user", "content": "hello"}] and bodies[0]["stream"] is True
    assert bodies[1]["messages"] == [{"role": "system", "content": "be brief"}]
    method, path, headers, _ = server.requests[0]
    assert (method, path, headers["authorization"]) == ("POST", "/base/v1/chat/completions", "Bearer k")


def test_a_chat_role_is_no_token():
    first = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    words = [event({"choices": [{"delta": {"content": word}}]}) for word in ("a", "b")]

    async def main():
        async with FakeServer(lambda *_: stream(first, *words, event("[DONE]"))) as server:
            return await run(Sender(Client(server.url), "/v1/chat/completions", [Prompt("x")], {}), [0.0])

    (record,) = asyncio.run(main())
    assert len(record.tokens_at) == 2


def test_a_connection_closed_while_idle_costs_no_request():
    """The server closes after every answer, without saying so."""

    async def main():
        async with FakeServer(lambda *_: [*stream(*completion("a")), CLOSE]) as server:
            send = Sender(Client(server.url), "/v1/completions", [Prompt("x")] * 20, {})
            return await run(send, [0.0] * 20, max_concurrency=2), server

    records, server = asyncio.run(main())
    assert [record.error for record in records] == [""] * 20 and len(server.requests) == 20


def test_a_piece_that_is_cut_anywhere_gives_the_same_events():
    text = 'data: {"a": "é\\n"}\r\n\r\n: comment\r\n\r\nevent: x\r\ndata: 1\r\ndata: 2\r\n\r\ndata:[DONE]\n\n'.encode()
    for cut in range(len(text)):
        events = ServerSentEvents()
        assert events.feed(text[:cut]) + events.feed(text[cut:]) == ['{"a": "é\\n"}', "1\n2", "[DONE]"]


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://x/?a=b"])
def test_addresses_that_are_none(url):
    with pytest.raises(ConfigError, match="is no address"):
        Client(url)


# ------------------------------------------------------------------------------------------------- the workload


def test_arrivals_are_poisson_unless_they_shall_not_be():
    n, rate = 20_000, 4.0
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(n, rate, np.random.default_rng(1), burstiness)
        gaps = np.diff(times)
        assert times[0] == 0 and gaps.mean() == pytest.approx(1 / rate, rel=0.05)
        assert gaps.std() == pytest.approx(gaps.mean() / burstiness**0.5, rel=0.05)
    assert arrivals(3, math.inf, np.random.default_rng(1)) == [0, 0, 0]
    assert arrivals(5, 2, np.random.default_rng(7)) == arrivals(5, 2, np.random.default_rng(7))
    for rate, burstiness in ((0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.nan)):
        with pytest.raises(ConfigError):
            arrivals(3, rate, np.random.default_rng(1), burstiness)


def test_random_prompts_have_their_lengths_and_share_their_prefix():
    prompts = random_prompts(200, 40, 10, np.random.default_rng(3), prefix_share=0.5, range_ratio=0.5, vocab=(5, 9))
    lengths, outputs = {len(p.content) for p in prompts}, {p.max_tokens for p in prompts}
    assert (min(lengths), max(lengths), min(outputs), max(outputs)) == (20, 60, 5, 15)
    assert len({tuple(p.content[:20]) for p in prompts}) == 1 and len({tuple(p.content) for p in prompts}) > 150
    assert {token for p in prompts for token in p.content} == {5, 6, 7, 8}
    (chat,) = random_prompts(1, 12, 4, np.random.default_rng(3), text=True)
    assert len(chat.content.split()) == 12 and chat.chat()["messages"][0]["content"] == chat.content
    with pytest.raises(ConfigError, match="cannot be given as ids"):
        prompts[0].chat()
    for wrong in ({"prefix_share": 1.1}, {"range_ratio": 1}, {"vocab": (9, 9)}):
        with pytest.raises(ConfigError):
            random_prompts(1, 4, 4, np.random.default_rng(0), **wrong)


def test_files_of_prompts(tmp_path):
    def written(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    assert read(written("a.txt", "one\n\n  \ntwo\n")) == [Prompt("one"), Prompt("two")]
    chat = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    lines = [{"prompt": "p", "max_tokens": 3}, {"prompt": [1, 2]}, {"conversations": chat, "id": "x"}]
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    expected = [Prompt("p", 3), Prompt([1, 2]), Prompt(asked)]
    assert read(written("b.jsonl", "\n".join(map(json.dumps, lines)))) == expected
    assert read(written("b.json", json.dumps(lines, indent=1))) == expected
    assert expected[2].completion() == {"prompt": "s\nq"}
    wrong = {
        '{"prompt": ""}': "without a prompt",
        "[": "no JSON",
        "{oops": "no JSON",
        "7": "without a prompt",
        '{"prompt": "p", "max_tokens": 0}': "max_tokens",
        '{"conversations": [{"from": "gpt", "value": "a"}]}': "without a prompt",
        '{"conversations": [{"from": "owl", "value": "a"}]}': "a turn",
        "": "no prompt",
    }
    for text, said in wrong.items():
        with pytest.raises(DataError, match=said):
            read(written("c.jsonl", text))
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "none.txt")


def test_prompts_are_drawn_once_each_before_any_comes_again():
    ten = [Prompt(str(i)) for i in range(10)]
    once = drawn(ten, 25, np.random.default_rng(2))
    assert sorted(p.content for p in once[:10]) == sorted(p.content for p in once[10:20]) == sorted(map(str, range(10)))
    assert once[:10] != ten and once == drawn(ten, 25, np.random.default_rng(2))
