"""The commands of the documentation, as a user types them: real processes, real torchrun."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch

from labkit.ranks.torchrun import launch
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.thorough import mostly_thorough

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
PRETRAIN = "-m minimegatron.commands.pretrain_gpt --mock-data"
TINY = (
    "--seq-length 16 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --lr 1e-2 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 2 --global-batch-size 4"
)


def start(line: str, cwd: Path, env: Mapping[str, str] = ENV) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *shlex.split(line)],
        cwd=cwd,
        env={**env, "TMPDIR": str(cwd)},  # torchrun leaves its folder of logs
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def python(line: str, cwd: Path, seconds: float = 120.0, env: Mapping[str, str] = ENV) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `python <line>`; the whole process group is killed at the deadline."""
    process = start(line, cwd, env)
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# One interpreter imports torch and then becomes each of the commands in turn: what a start costs is paid once.
BECOME = """
import json, os, runpy, sys
import minimegatron.commands.pretrain_gpt
import torch._dynamo  # torch's optimizers would, each time
for name, words in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if not pid:
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_CREAT | os.O_WRONLY), descriptor)
        sys.argv = words
        run = runpy.run_path if words[0].endswith(".py") else runpy.run_module
        run(words[0], run_name="__main__", **({} if words[0].endswith(".py") else {"alter_sys": True}))
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
MODULE = "minimegatron.commands.pretrain_gpt"
LOOP = ROOT / "examples" / "simple_loop.py"
ALONE = {
    "loop": f"{LOOP} --steps 4",
    "config": f"{MODULE} --mock-data {TINY} --tran-iters 3",
    "data": f"{MODULE} --data-path no --tokenizer-type NullTokenizer --vocab-size 9",
    "numerics": f"{MODULE} --mock-data {TINY} --init-method-std 1e30",
    "backend": f"{MODULE} --mock-data {TINY} --distributed-backend nccl",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """{name: exit status, stdout and stderr} of each command in a process of its own."""
    folder = tmp_path_factory.mktemp("alone")
    words = json.dumps({name: shlex.split(line) for name, line in ALONE.items()})
    status, out, err = python(f"-c {shlex.quote(BECOME)} {shlex.quote(words)}", folder)
    assert status == 0, err
    ended = dict(line.split() for line in out.splitlines())
    assert list(ended) == list(ALONE), err
    said = {name: [(folder / f"{name}.{kind}").read_text() for kind in ("out", "err")] for name in ALONE}
    return {name: (int(ended[name]), *said[name]) for name in ALONE}


def forked(args: str, folder: Path) -> tuple[int, str, str]:
    """`torchrun` on two ranks as labs have it, whose agent and ranks are forked: a tenth of the CPU-seconds."""
    run = launch(str(ROOT / "minimegatron/commands/pretrain_gpt.py"), 2, folder, args=shlex.split(args))
    return run.returncode, "".join(run.stdout), run.explain() + "".join(run.stderr)


def executed(args: str, folder: Path) -> tuple[int, str, str]:
    return python(f"{TORCHRUN} -m {MODULE} {args}", folder)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", mostly_thorough([forked, executed], [0]))
def test_torchrun_on_two_ranks_logs_what_one_process_computes(tmp_path, torchrun):
    flags = f"{TINY} --train-iters 4 --eval-interval 2 --eval-iters 1"
    layout = f"--tensor-model-parallel-size 2 --sequence-parallel --log-file {tmp_path}/run.jsonl --use-mcore-models"
    status, out, err = torchrun(f"--mock-data {flags} {layout}", tmp_path)
    assert status == 0, err
    serial = build_trainer(parse_args(["--mock-data", *shlex.split(flags)]), quiet=True)
    serial.train()
    lines = [line for line in out.splitlines() if line.startswith(" iteration")]
    assert [float(re.search(r"lm loss: (\S+)", line)[1]) for line in lines] == pytest.approx(
        [r.losses["lm loss"] for r in serial.history], rel=1e-5
    )
    assert out.count("changes nothing") == 1 and out.count("validation loss at iteration") == 3
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    records = [record for record in records if record["event"] != "message"]
    events = ["config", "train", "train", "validation", "train", "train", "validation", "test", "end"]
    assert [r["event"] for r in records] == events
    assert records[0]["parallel"]["tensor_model_parallel_size"] == 2
    assert records[1]["losses"]["lm loss"] == pytest.approx(serial.history[0].losses["lm loss"], rel=1e-6)


@pytest.mark.thorough
def test_torchrun_with_a_pipeline_logs_what_one_process_computes(tmp_path):
    flags = f"{TINY} --num-layers 4 --train-iters 2 --eval-interval 2 --eval-iters 1"
    layout = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    status, out, err = python(f"{TORCHRUN} -m minimegatron train --mock-data {flags} {layout}", tmp_path)
    assert status == 0, err
    assert "pipeline: interleaved, 4 stages of 1 1 1 1 layers on 2 ranks" in out
    serial = build_trainer(parse_args(["--mock-data", *shlex.split(flags)]), quiet=True)
    serial.train()
    assert [float(value) for value in re.findall(r"lm loss: (\S+)", out)] == pytest.approx(
        [r.losses["lm loss"] for r in serial.history], rel=1e-5
    )
    assert out.count("validation loss at iteration") == 2


def loop(rank: int, world: int) -> str:
    """What the loop prints on a rank, which has its process group already."""
    spec = importlib.util.spec_from_file_location("simple_loop", LOOP)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.init = lambda: (rank, world)
    with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch.object(sys, "argv", ["loop", "--steps", "4"]):
        module.main()
    return out.getvalue()


def test_the_loop_on_one_page_prints_the_same_on_two_ranks(ranks, alone):
    status, serial, err = alone["loop"]
    assert status == 0, err
    together, silent = ranks(2).run(loop)
    assert silent == ""
    number = r"\d+\.\d+"
    assert re.sub(number, "", together) == re.sub(number, "", serial) and len(serial.splitlines()) == 4
    found, want = ([float(value) for value in re.findall(number, text)] for text in (together, serial))
    assert found == pytest.approx(want, rel=1e-4) and len(want) == 8
    assert len(LOOP.read_text().splitlines()) < 100


@pytest.mark.thorough
def test_a_nan_under_torchrun_is_one_message_and_no_rank_goes_on(tmp_path):
    status, out, err = python(f"{TORCHRUN} {PRETRAIN} {TINY} --train-iters 4 --init-method-std 1e38", tmp_path)
    assert status != 0 and err.count("failed: BadStep: lm loss is") == 1 and " iteration" not in out, err
    assert re.search(r"exitcode +: 6 ", err), err


@pytest.mark.parametrize(
    "name, status, words",
    [
        ("config", 2, "did you mean `--train-iters`?"),
        ("data", 4, "DataError"),
        ("numerics", 6, "BadStep: lm loss is"),
        ("backend", 2, "ConfigError: NCCL needs a GPU for each rank, and rank 0"),
    ],
)
def test_exit_statuses(alone, name, status, words):
    found, _, err = alone[name]
    assert found == status and words in err and "Traceback" not in err, err


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a GPU that torch cannot use")
def test_a_gpu_that_torch_cannot_use_is_refused_unless_the_cpu_is_asked_for(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 535.104.05'\n")
    tool.chmod(0o755)
    env = {name: value for name, value in ENV.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    line = f"{PRETRAIN} {TINY} --train-iters 1"
    status, _, err = python(line, tmp_path, env=env)
    assert status == 2 and "nvidia-smi lists 1 GPU with driver 535.104.05" in err and "Traceback" not in err, err
    for asked, flags, why in [
        ({}, "--distributed-backend gloo", "as asked"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "", "hides"),
    ]:
        status, out, err = python(f"{line} {flags}", tmp_path, env={**env, **asked})
        assert status == 0 and out.startswith("gloo on the CPU (") and why in out.splitlines()[0], out + err


@pytest.mark.thorough
def test_tasks_of_srun_meet(tmp_path):
    script = tmp_path / "task.py"
    script.write_text(
        "import torch\n"
        "from minimegatron.comm.collectives import all_reduce\nfrom minimegatron.comm.mesh import Axis\n"
        "from minimegatron.launch.rank import described, finish, init\n"
        "rank, world = init(30)\n"
        "print(rank, all_reduce(torch.ones(1), Axis.world('all')).item(), described())\nfinish()"
    )
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    tasks = [
        start(str(script), tmp_path, {**ENV, **step, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in (0, 1)
    ]
    try:
        said = [task.communicate(timeout=60) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    where = "gloo on the CPU (CUDA_VISIBLE_DEVICES hides all GPUs): 2 ranks on 1 machine"
    assert [out for out, _ in said] == [f"{r} 2.0 {where}\n" for r in (0, 1)], said


def test_the_documented_run_is_a_valid_command_line():
    script = (ROOT / "examples" / "pretrain_stdlib.sh").read_text()
    flags = script[script.index("--preset") : script.index('"$@"')].replace("\\\n", " ")
    flags = flags.replace('"${LAYOUT[@]}"', "--tensor-model-parallel-size 2 --sequence-parallel").replace("$NPROC", "4")
    run = parse_args(shlex.split(flags), world_size=4)
    assert run.data.corpus == "stdlib" and run.training.train_iters == 50
