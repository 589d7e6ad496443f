"""The server over HTTP: what is new, nothing but reading, this machine alone; and the command around it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minimegatron.cli import main
from minimegatron.errors import ConfigError
from minimegatron.watch.log import RunLog
from minimegatron.watch.predicted import predict, question_of
from minimegatron.watch.server import Server, Watched
from tests.watch.generated import config, records, write
from tests.watch.test_log import add, simple


class Client:
    def __init__(self, port: int) -> None:
        self.to = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        self.to.request(method, path, headers=headers)
        answer = self.to.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        return answer

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path).body)  # type: ignore[attr-defined]


@contextlib.contextmanager
def serving(*paths: Path) -> Iterator[Client]:
    with Server(Watched([RunLog(path) for path in paths]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        client = Client(server.server_port)
        try:
            yield client
        finally:
            client.to.close()
            server.shutdown()
            thread.join(10)


def test_a_page_gets_what_is_new(tmp_path):
    path = tmp_path / "run.jsonl"
    add(path, config(), *(simple(i, 10.0 / i) for i in range(1, 101)))
    with serving(path) as client:
        assert client.json("/api/runs") == [str(path)]
        whole = client.json("/api/run/0?points=50")
        assert whole["iteration"] == 100 and whole["width"] == 4 and whole["curves"]["lm loss"]["at"][-1] == 100
        assert whole["run"]["optimizer"]["clip_grad"] == 1.0 and whole["predicted"] is None
        add(path, simple(101, 0.05), simple(102, 0.04))
        known = "&".join(f"{key}={whole[value]}" for key, value in
                         {"generation": "generation", "since": "next", "width": "width"}.items())  # fmt: skip
        seq = whole["lines"][-1]["seq"]
        new = client.json(f"/api/run/0?points=50&lines={seq}&{known}")
        assert new["since"] == 100 and new["curves"]["lm loss"]["at"] == [102] and new["run"] is None
        assert [line["at"] for line in new["lines"]] == [101, 102]
        zoomed = client.json(f"/api/run/0?points=50&first=10&end=20&{known}")
        assert zoomed["since"] == 0 and zoomed["curves"]["lm loss"]["at"] == list(range(10, 20))
        add(path, simple(50, 1.0))
        again = client.json(f"/api/run/0?points=50&{known}")
        assert again["since"] == 0 and again["generation"] != whole["generation"] and again["iteration"] == 50


def test_it_reads_only_and_answers_this_machine_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    add(path, config(), simple(1, float("nan")), {"event": "message", "text": "loss is NaN"})
    with serving(path) as client:
        page = client.ask("/")
        assert page.status == 200 and b"<script src" in page.body  # type: ignore[attr-defined]
        policy = page.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "http" not in policy
        for name in ("/page.js", "/curves.js", "/panels.js", "/page.css"):
            answer = client.ask(name)
            assert answer.status == 200 and b"http" not in answer.body.replace(b"http://127", b"")  # type: ignore[attr-defined]
        assert client.ask("/", Host="evil.example").status == 403
        assert client.ask("/api/run/0", Host="127.0.0.1.evil.example:80").status == 403
        assert client.ask("/", Host="localhost:9999").status == 200, "a forwarded port"
        assert client.ask("/", method="HEAD").body == b""  # type: ignore[attr-defined]
        assert client.ask("/api/run/0", method="DELETE").status == 501
    with serving(path) as client:
        assert [client.ask(f"/{p}").status for p in ("x", "api/run/1", "../setup.py", "api/run/0/x")] == [404] * 4
        assert client.ask("/api/run/0?points=many").status == 400 and client.ask("/api/run/0?points=0").status == 409
        body = client.ask("/api/run/0").body  # type: ignore[attr-defined]
        found = json.loads(body, parse_constant=lambda word: pytest.fail(word))
        assert found["latest"]["train"]["losses"] == {"lm loss": None} and found["lines"][-1]["text"] == "loss is NaN"
        path.unlink()
        gone = client.ask("/api/run/0")
        assert gone.status == 409 and b"cannot read" in gone.body  # type: ignore[attr-defined]


def test_a_port_that_is_taken_and_runs_that_are_none(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", records(2))
    with Server(Watched([]), 0) as server:
        assert main(["watch", str(path), "--port", str(server.server_port)]) == 2
        assert f"port {server.server_port} is taken" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be used"):
        Server(Watched([]), 70_000)
    assert main(["watch", str(tmp_path / "none")]) == 4 and "there is no run" in capsys.readouterr().err
    assert main(["watch", *[str(path)] * 3]) == 2 and "3 runs" in capsys.readouterr().err


def test_ctrl_c_ends_it_and_torch_is_not_imported(tmp_path):
    path = write(tmp_path / "run.jsonl", records(3))
    code = "import sys; from minimegatron.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "watch", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        address = watch.stdout.readline().split(": http://127.0.0.1:")[1].split("/")[0]
        assert Client(int(address)).json("/api/runs") == [str(path)]
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=30)
    assert watch.returncode == 0 and out.split() == ["False"] and err == ""


def test_the_planner_is_asked_about_the_run_of_a_log():
    two = config("--pipeline-model-parallel-size 2 --num-layers 4", world=4)
    told = predict(two, None)
    assert list(told["memory"]) == [0, 2] and told["time"] is None and "plan --measure" in told["why"]
    first = told["memory"][0]
    assert first["lasting"]["moments"] == 2 * first["lasting"]["gradients"] > 0 and not first["unknown"]
    assert predict(two, "h100")["time"]["seconds"] > 0
    gpu = config("--bf16", device="cuda")
    gpu["machine"]["device_name"] = "NVIDIA H100 80GB HBM3"
    assert predict(gpu, None)["time"]["cluster"] == "H100"
    assert question_of(two, None) == question_of(json.loads(json.dumps(two)), None) != question_of(gpu, None)
