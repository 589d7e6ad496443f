"""The `minimegatron` command: `minimegatron COMMAND ...`, each command a module with a `main(argv)`.

A command's module is imported only when it is called, so `minimegatron --help` answers at once. Exit statuses are those
of `minimegatron.errors`: a user's mistake prints its message, never a traceback; anything else is a defect and does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import select
import sys
from collections.abc import Sequence

import minimegatron
from minimegatron.errors import ConfigError, MinimegatronError, did_you_mean

# command -> (module with main(argv), what it does)
COMMANDS = {
    "train": (
        "minimegatron.commands.pretrain_gpt",
        "train a GPT; ranks: torchrun --nproc-per-node N -m minimegatron train",
    ),
    "sft": ("minimegatron.commands.sft", "fine-tune on conversations: the assistant's tokens count"),
    "dpo": ("minimegatron.commands.dpo", "learn from pairs of a chosen and a rejected answer"),
    "reward": ("minimegatron.commands.reward", "train a reward model on pairs of answers"),
    "grpo": ("minimegatron.commands.grpo", "learn from rewards: answers are drawn, judged and compared in groups"),
    "ppo": ("minimegatron.commands.ppo", "learn from rewards, with a value head"),
    "distill": ("minimegatron.commands.distill", "a student learns the distribution of a teacher"),
    "watch": ("minimegatron.commands.watch", "a page that shows a run while it trains, or two"),
    "lora": ("minimegatron.commands.lora", "adapters of a run: export to PEFT, import from it, merge"),
    "torchrun": ("labkit.ranks.agent", "torchrun, without its report of 40 lines when a rank has failed"),
    "checkpoint": ("minimegatron.commands.checkpoint", "inspect, verify or compare what a training has saved"),
    "flight-recorder": (
        "minimegatron.commands.flight_recorder",
        "after a hang: which rank did what, at which line, while the others waited in which",
    ),
    "trace": ("minimegatron.commands.trace", "one trace of all profiled ranks, for Perfetto"),
    "memory": ("minimegatron.commands.memory", "the memory of every rank by name, before anything runs"),
    "plan": ("minimegatron.commands.plan", "will it fit, how fast, which layout; --search, --measure"),
    "compare": (
        "minimegatron.commands.compare",
        "a layout beside one process: the first tensor that differs, and where",
    ),
    "train-tokenizer": ("minimegatron.data.tokenizer_training", "learn a byte-level BPE from files of documents"),
    "preprocess": ("minimegatron.data.preprocess", "turn documents into the .bin and .idx files that training reads"),
    "experts": ("minimegatron.commands.expert_loads", "how evenly a training loaded its experts; a better placement"),
    "convert": ("minimegatron.commands.convert", "published models and checkpoints, one into the other"),
    "quantize": ("minimegatron.commands.quantize", "a model in 4 or 8 bits a weight, as transformers and vLLM load it"),
    "prune": ("minimegatron.commands.prune", "a smaller model of the parts that a text uses most, for distill to mend"),
    "generate": ("minimegatron.commands.generate", "continue a prompt; ranks: torchrun -m minimegatron generate"),
    "report": ("minimegatron.commands.report", "one page about a whole run: curves, samples, tasks, time and cost"),
    "evaluate": ("minimegatron.commands.evaluate", "perplexity, bits per byte, multiple choice, lm-eval's tasks"),
    "serve": (
        "minimegatron.commands.serve",
        "answer OpenAI's requests with a model; ranks: torchrun -m minimegatron serve",
    ),
    "bench-serve": ("minimegatron.commands.bench_serve", "load any OpenAI-compatible server: latencies, throughput"),
    "lab": ("minimegatron.commands.jupyter", "open JupyterLab on the labs"),
    "build-labs": ("labkit.build", "write the notebooks from their sources; --check says which are stale"),
    "grade": ("labkit.grade", "mark a folder of submissions: CSV, JSON, a report, feedback for each learner"),
    "capstone": ("labkit.begin", "begin a capstone: a folder with what is handed in; without words: which there are"),
    "progress": ("labkit.progress", "your points in each lab"),
    "quiz": ("labkit.quiz", "questions of an interview, with check-lists of what you can"),
    "doctor": ("minimegatron.commands.doctor", "say what this machine can do, how things run on it, and what to add"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: command and its arguments; default those of the process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # A fifth of the time of a short command is else the search for garbage among what it has imported.
        gc.set_threshold(50_000)
        atexit.register(gc.freeze)
    try:
        try:
            return _status(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 141  # 128 + SIGPIPE, as a shell says it
    except KeyboardInterrupt:
        return 130


def _status(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"minimegatron {minimegatron.__version__}")
        return 0
    try:
        return run(words[0], words[1:])
    except MinimegatronError as error:
        print(f"minimegatron {words[0]}: {error}", file=sys.stderr)
        return error.exit_code


def run(name: str, argv: list[str]) -> int:
    """Import the command's module and call it.

    Raises:
        ConfigError: there is no such command.
    """
    if name not in COMMANDS:
        raise ConfigError("no such command", fix=did_you_mean(name, COMMANDS) or f"one of {', '.join(COMMANDS)}")
    status = importlib.import_module(COMMANDS[name][0]).main(argv)
    return int(status or 0)


def _reader_is_gone() -> bool:
    """Whether the reader of the output has gone, as after `| head`; from then on nothing is written to it."""
    output = sys.stdout.fileno()
    asked = select.poll()
    asked.register(output, 0)
    if not any(said & (select.POLLERR | select.POLLHUP) for _, said in asked.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def usage() -> str:
    """The list of commands."""
    lines = ["usage: minimegatron COMMAND ...      (minimegatron COMMAND --help, minimegatron --version)", ""]
    lines += [f"  {name:<16}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(lines)
