"""What the planner says of the run in a log: memory by owner of each pipeline stage, and the time of a step.

    python -m minimegatron.watch.predicted < QUESTION      {"config": the log's, "cluster": name, file or null}

The planner runs layers on fake tensors and imports torch, which takes seconds and hundreds of megabytes; so it is asked
in a process of its own, once, and `minimegatron watch` itself stays small. `Predictor` starts it, and ends it when it
takes longer than `SECONDS`.

The time of a step needs rates of operations. On a GPU of the planner's table they are that table's; of another machine,
such as this one's CPU, `minimegatron plan --measure FILE.json` writes them and `watch --cluster FILE.json` reads them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from minimegatron.errors import MinimegatronError
from minimegatron.launch.procs import die_with_parent

SECONDS = 600.0
SECTIONS = ("model", "parallel", "optimizer", "data", "training")


def question_of(config: Mapping[str, Any], cluster: str | None) -> str:
    """What decides a prediction, as JSON; equal questions have equal answers."""
    parts = {name: config.get(name) for name in (*SECTIONS, "spec", "machine")}
    return json.dumps({"config": parts, "cluster": cluster}, sort_keys=True)


class Predictor:
    """Asks in the background, one question at a time; `stop` ends what is under way.

    Args:
        cluster: `--cluster`, or None.
    """

    def __init__(self, cluster: str | None = None) -> None:
        self.cluster = cluster
        self._answers: dict[str, dict[str, Any]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._one = threading.Lock()

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The answer for a configuration, or {"pending": true}."""
        if "world_size" not in config.get("machine", {}):
            return {"error": "the log does not say how many ranks there are: it is of an older version"}
        question = question_of(config, self.cluster)
        if question not in self._answers:
            if len(self._answers) > 16:
                self._answers.clear()
            self._answers[question] = {"pending": True}
            threading.Thread(target=self._ask, args=(question,), daemon=True).start()
        return self._answers[question]

    def _ask(self, question: str) -> None:
        with self._one:
            if self._stopped:
                return
            command = [sys.executable, "-m", "minimegatron.watch.predicted"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            try:
                said, complaint = self._process.communicate(question, timeout=SECONDS)
                answer = json.loads(said.splitlines()[-1])
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()  # no deadline: it was killed
                answer = {"error": f"the planner took longer than {SECONDS:g} s"}
            except (ValueError, IndexError):
                answer = {"error": f"the planner failed: {complaint.strip().splitlines()[-1:] or 'it was ended'}"}
            self._answers[question] = answer

    def stop(self) -> None:
        """End the process, if there is one."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def predict(config: Mapping[str, Any], cluster_name: str | None) -> dict[str, Any]:
    """Memory and time of a run.

    Returns:
        `memory`: {rank: {peak, lasting: {owner: bytes}, where, unknown}} of the first rank of each pipeline stage;
        `time`: {seconds, mfu, tflops, parts, cluster} or None, then `why`.

    Raises:
        ConfigError: the configuration, or the cluster.
    """
    from minimegatron.comm.mesh import rank_groups
    from minimegatron.config.run import SECTIONS as CLASSES
    from minimegatron.config.run import RunConfig
    from minimegatron.footprint.events import Unpredicted
    from minimegatron.planner.cluster import CLUSTERS, read_cluster
    from minimegatron.planner.timing import step_time
    from minimegatron.training.memory_report import predict_run

    spec = config.get("spec")
    sections = {name: CLASSES[name].from_dict(dict(config[name] or {})) for name in SECTIONS}
    run = RunConfig(**sections, spec=(spec[0], spec[1]) if spec else None)
    machine = config["machine"]
    world, device, name = machine["world_size"], machine["device"], machine.get("device_name") or ""
    memory = {}
    for rank in rank_groups(run.parallel, world, "pp")[0]:
        told = predict_run(run, rank, world, device)
        memory[rank] = {"peak": told.peak, "lasting": told.lasting, "where": told.where, "unknown": list(told.unknown)}
    chosen = cluster_name or next((preset for preset in CLUSTERS if preset.upper() in name.upper().split()), None)
    found: dict[str, Any] = {"memory": memory, "time": None}
    if chosen is None:
        what = name or f"a {device}"
        return found | {"why": f"rates of {what} are not known: minimegatron plan --measure FILE.json writes them, "
                        "watch --cluster FILE.json reads them"}  # fmt: skip
    cluster = read_cluster(chosen)
    try:
        time = step_time(run, world, cluster)
    except Unpredicted as what:
        return found | {"why": str(what)}
    seconds = {"seconds": time.seconds, "mfu": time.mfu, "tflops": time.tflops, "parts": time.parts}
    return found | {"time": seconds | {"cluster": cluster.gpu}}


def main() -> None:
    """Answer the question on the standard input, after whatever trains on this machine, and not longer than it is
    awaited."""
    die_with_parent(signal.SIGKILL)
    os.nice(10)
    question = json.load(sys.stdin)
    try:
        answer = predict(question["config"], question["cluster"])
    except MinimegatronError as error:
        answer = {"error": error.what}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
