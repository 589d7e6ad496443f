import contextlib
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import minimegatron
from labkit import acceptance
from minimegatron import cli, errors
from minimegatron.cli import COMMANDS, main
from minimegatron.training.arguments import parse_args

EXIT_STATUSES = {
    "ConfigError": 2,
    "CheckpointError": 3,
    "DataError": 4,
    "RankError": 5,
    "NumericsError": 6,
    "BadStep": 6,
    "DeadlineError": 7,
}


@pytest.fixture
def command(monkeypatch):
    """Register a command whose main is the given function."""

    def add(function):
        module = types.ModuleType("a_command")
        module.main = function
        monkeypatch.setitem(sys.modules, "a_command", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("a_command", ""))

    return add


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists(name):
    assert callable(importlib.import_module(COMMANDS[name][0]).main)


def test_usage_lists_every_command_and_fits_the_terminal(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert max(map(len, text.splitlines())) <= 100
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"minimegatron {minimegatron.__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("docter", "doctor"), ("pre-process", "preprocess")])
def test_an_unknown_command_is_refused_with_the_nearest(typed, meant, capsys):
    assert main([typed]) == 2
    error = capsys.readouterr().err
    assert f"minimegatron {typed}: no such command" in error and f"did you mean `{meant}`?" in error


def test_an_unknown_command_with_nothing_near_lists_all(capsys):
    assert main(["zzzzzz"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in COMMANDS)


@pytest.mark.parametrize(("kind", "status"), EXIT_STATUSES.items())
def test_our_errors_become_their_exit_status_and_text(kind, status, command, capsys):
    def fail(argv):
        raise getattr(errors, kind)("it broke", where="rank 1", fix="mend it")

    command(fail)
    assert main(["try"]) == status
    captured = capsys.readouterr()
    assert captured.err == "minimegatron try: it broke\n  where: rank 1\n  fix: mend it\n"
    assert captured.out == ""


def test_the_table_of_exit_statuses_is_complete():
    kinds = {k.__name__: k.exit_code for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)}
    assert {k: v for k, v in kinds.items() if k != "MinimegatronError"} == EXIT_STATUSES


def test_a_defect_keeps_its_traceback(command):
    command(lambda argv: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_a_command_gets_its_arguments_and_returns_its_status(command):
    command(lambda argv: len(argv))
    assert main(["try", "--a", "b"]) == 2
    command(lambda argv: None)
    assert main(["try"]) == 0


def test_control_c_is_130(command):
    def interrupted(argv):
        raise KeyboardInterrupt

    command(interrupted)
    assert main(["try"]) == 130


@pytest.mark.parametrize(("words", "buffered"), [("--help", "1"), ("--help", ""), ("doctor -h", "")])
def test_an_output_that_nobody_reads_ends_quietly(words, buffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", buffered)  # with "1" the words fail when they are printed, not at the end
    late = f'read line; exec "{sys.executable}" -m minimegatron {words}'
    running = subprocess.Popen(["sh", "-c", late], **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE))
    running.stdout.close()
    assert running.communicate(b"\n", timeout=60)[1] == b"" and running.returncode == 141


def test_a_broken_pipe_elsewhere_is_a_defect(command):
    def broken(argv):
        raise BrokenPipeError("a rank's own")

    command(broken)
    with pytest.raises(BrokenPipeError, match="a rank's own"):
        main(["try"])


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "minimegatron", "nothing-like-it"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "") and "no such command" in done.stderr


# Programs that messages, docs and examples also name, and flags of theirs.
FOREIGN = {
    "torchrun": "nproc-per-node nnodes standalone rdzv-id rdzv-backend rdzv-endpoint max-restarts log-dir redirects "
    "shutdown-timeout signal",
    "sbatch, srun": "job-name nodes ntasks-per-node gpus gpus-per-node gpus-per-task gpu-bind gres cpus-per-task mem "
    "time exclusive requeue output open-mode kill-on-bad-exit wrap signal",
    "docker": "rm gpus ipc network ulimit shm-size security-opt",
    "pip, venv": "constraint only-binary no-compile no-build-isolation no-deps system-site-packages",
    "twine, auditwheel, gh, pytest": "strict plat notes-file thorough quick",
    "nvcc, nvidia-smi": "cudart version query-gpu format",
    "Megatron-LM": "check-for-spiky-loss dist-ckpt-optim-fully-reshardable split-sentences megatron-path "
    "target-pipeline-parallel-size target-expert-parallel-size",
    "transformers": "dtype",
    "scripts of our own": "constraints pulse stamp steps text write",
}
FOLDERS = {"minimegatron": "*.py", "docs": "*.md", "examples": "*", ".": "README.md"}


def test_every_flag_that_is_named_is_one_that_a_command_takes(capsys):
    known = {f"--{flag}" for flags in FOREIGN.values() for flag in flags.split()} | {"--version"}
    for name, action in [*((name, "") for name in COMMANDS), *(("checkpoint", a) for a in ("inspect", "diff"))]:
        with contextlib.suppress(SystemExit):
            main([name, *filter(None, [action]), "--help"])
        known |= set(re.findall(r"--[A-Za-z][\w-]*", capsys.readouterr().out))
    root, named = Path(minimegatron.__file__).parents[1], {}
    for capstone in acceptance.known():
        with contextlib.suppress(SystemExit):
            main(["grade", "folder", "--capstone", capstone, "--help"])
        known |= set(re.findall(r"--[A-Za-z][\w-]*", capsys.readouterr().out))
    for folder, pattern in FOLDERS.items():
        for path in root.joinpath(folder).glob(pattern if folder == "." else f"**/{pattern}"):
            if path.is_file() and "__pycache__" not in path.parts:
                for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-]|\*)", path.read_text(errors="replace")):
                    named.setdefault(flag, f"{path.relative_to(root)} names {flag}")
    assert len(named) > 300 and not [where for flag, where in named.items() if flag not in known]


MISTAKES = [
    "plan --world-size x",
    "generate --prompt x",
    "preprocess",
    "experts",
    "memory --device tpu",
    "doctor --foo",
    "lab --foo",
    "progress --foo",
    "grade",
    "convert --to huggingface",
    "checkpoint verify",
    "train --lr",
    "train --mock-data --tensor-model-parallel-size 3",
]


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_on_the_command_line_is_told_in_a_few_lines_with_its_fix(line, capsys):
    name, *words = line.split()
    if name == "train":  # its `main` is the whole life of a rank
        with pytest.raises(errors.ConfigError) as caught:
            parse_args(words)
        said = str(caught.value)
    else:
        assert main([name, *words]) == 2
        said = capsys.readouterr().err
    assert len(said.splitlines()) <= 6 and "fix: " in said and "Traceback" not in said
