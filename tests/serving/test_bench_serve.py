"""The command, against a fake server in a thread of its own."""

import asyncio
import json
import threading

import pytest

from minimegatron.cli import main
from minimegatron.commands.bench_serve import Run, parse, prompts, runs
from minimegatron.errors import ConfigError
from tests.serving.fake import FakeServer, completion, plain, stream


@pytest.fixture
def server():
    """(address, bodies): every third request is refused, all others have two tokens."""
    ready, over, found = threading.Event(), asyncio.Event(), {}

    def answer(path, body, n):
        if path == "/v1/models":
            return plain(200, '{"data": [{"id": "fake"}]}')
        return plain(429, "full") if body["seed"] % 3 == 2 else stream(*completion("a", "b"))

    async def serve():
        found["loop"] = asyncio.get_running_loop()
        async with FakeServer(answer) as fake:
            found["fake"] = fake
            ready.set()
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield found["fake"]
    found["loop"].call_soon_threadsafe(over.set)
    thread.join(60)


def test_a_sweep_is_printed_written_and_drawn(server, tmp_path, capsys):
    result, picture = tmp_path / "r.json", tmp_path / "curve.png"
    flags = f"--base-url {server.url} --num-prompts 6 --request-rate 500 inf --random-input-len 5 --goodput ttft:9e5"
    flags += f" --api-key secret --save-result {result} --save-detailed --picture {picture}"
    assert main(["bench-serve", *flags.split()]) == 0
    said, written = capsys.readouterr().out, json.loads(result.read_text())
    assert "fake at http" in said and "500/s: 4 of 6 answered" in said and "all at once: 4 of 6 answered" in said
    assert said.count("failed: 2 x HTTP 429; the first: full") == 2 and "a core" in said
    assert [(r["request_rate"], r["completed"], r["goodput_share"]) for r in written["runs"]] == [
        (500, 4, pytest.approx(4 / 6)), (None, 4, pytest.approx(4 / 6))
    ]  # fmt: skip
    assert len(written["runs"][0]["requests"]) == 6 and "secret" not in result.read_text() + said
    assert picture.read_bytes()[:4] == b"\x89PNG"
    sent = [json.loads(body) for method, *_, body in server.requests if method == "POST"]
    assert len(sent) == 13 and len({tuple(body["prompt"]) for body in sent}) == 13  # one to warm up, none twice
    assert all(headers["authorization"] == "Bearer secret" for _, _, headers, _ in server.requests)
    assert {body["model"] for body in sent} == {"fake"} and {body["max_tokens"] for body in sent} == {64}


def test_a_server_that_is_not_there_or_refuses_is_an_error(server, capsys):
    assert main("bench-serve --base-url http://127.0.0.1:9 --ready-timeout 0".split()) == 7
    assert "the server is not there after 0 s" in capsys.readouterr().err
    server.answer = lambda path, body, n: plain(401, "who?")
    assert main(["bench-serve", "--base-url", server.url]) == 2
    assert "answers 401" in capsys.readouterr().err
    assert main(["bench-serve", "--base-url", server.url, "--model", "m"]) == 2
    assert "the first request failed (HTTP 401): who?" in capsys.readouterr().err


def test_the_points_of_a_sweep_and_their_prompts():
    args = parse(["--request-rate", "1", "inf", "--max-concurrency", "8"])
    assert runs(args) == [Run(1.0, 8), Run(float("inf"), 8)]
    assert [str(run) for run in runs(args)] == ["1/s, at most 8 at once", "8 at once"]
    assert [str(run) for run in runs(parse([]))] == ["all at once"]
    first, second = prompts(parse(["--num-prompts", "4", "--random-prefix-share", "0.5"]), 2)
    assert not {tuple(p.content) for p in first} & {tuple(p.content) for p in second}
    (chat,) = prompts(parse(["--num-prompts", "1", "--endpoint", "/v1/chat/completions"]), 1)
    assert isinstance(chat[0].content, str)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--request-rate 1 2 --max-concurrency 1 2", "sweep one of them"),
        ("--request-rate 0", "above 0"),
        ("--request-rate nan", "above 0"),
        ("--max-concurrency 0", "above 0"),
        ("--num-prompts 0", "--num-prompts 0"),
        ("--timeout inf", "--timeout inf"),
        ("--metric-percentiles 101", "between 0 and 100"),
        ("--extra-body [1]", "no JSON object"),
        ("--extra-body {oops", "--extra-body"),
        ("--max-tokens 5", "--random-output-len"),
        ("--base-url http://x:1/v1/", "leave it out"),
        ("--save-detailed", "without --save-result"),
        ("--picture none/there.png", "no folder"),
    ],
)
def test_mistakes_on_the_command_line(line, said):
    with pytest.raises(ConfigError, match=said):
        parse(line.split())
