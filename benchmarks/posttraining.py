"""How fast a step after pre-training is on a CPU, against TRL's trainers with the same weights.

    pip install trl==1.16.0 "datasets<5"                         nothing else in the project needs them
    OMP_NUM_THREADS=1 python -m benchmarks.posttraining          a few minutes
    OMP_NUM_THREADS=1 python -m benchmarks.posttraining --smoke  the same code on tiny sizes

| comparison   | ours                                        | theirs                                                  |
|--------------|---------------------------------------------|---------------------------------------------------------|
| `sft`        | rows with several conversations, no leaks   | `SFTTrainer`, padded to the longest of a microbatch     |
| `sft packed` | the same                                    | the same, `packing=True`: on a CPU conversations see    |
|              |                                             | each other, so it computes another loss                 |
| `grpo`       | rollouts by the engine, one update          | `GRPOTrainer`, rollouts by `generate`, one update       |

Both train a Llama of `benchmarks/contenders` in fp32 with AdamW. `sft`: each step has the same conversations, questions
about the standard library and the docstrings that answer them, and the losses of the first step are compared before
anything is timed. `grpo`: as many answers of as many tokens (random weights hardly ever draw the end of a text). The
cost is the CPU-seconds of whole steps, loading and rollouts included, after two steps (`labkit/paired.py`).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import logging
import math
import os
import platform
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import FULL, SMOKE, Workload, hugging_face_model
from labkit.paired import paired
from minimegatron.launch import procs
from minimegatron.models.chunks import count_parameters
from minimegatron.posttraining.environments import Sums
from minimegatron.posttraining.rows import RowDataset
from minimegatron.posttraining.tasks import TASKS
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.observers import Observer, Step
from minimegatron.training.trainer import Trainer

WARMUPS = 2
END = "<|end|>"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a step learns from.

    Attributes:
        model: of the benchmarks.
        longest: tokens of a row, and of the longest conversation.
        conversations: of a step of `sft`.
        micro_batch: conversations of a forward pass of theirs; ours has as many tokens.
        prompts, group, answer: of a step of `grpo`, and tokens of an answer.
        steps: that are timed in a run.
    """

    model: Workload
    longest: int
    conversations: int
    micro_batch: int
    prompts: int
    group: int
    answer: int
    steps: int


LARGE = Sizes(FULL, 512, 64, 8, 8, 8, 32, 2)
SMALL = Sizes(SMOKE, 64, 8, 2, 2, 2, 4, 1)


def docstrings() -> Iterator[tuple[str, str]]:
    """(question, docstring) of the public functions and classes of the standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
                yield f"What does `{path.stem}.{node.name}` do?\n", str(ast.get_docstring(node))


def prepare(folder: Path, sizes: Sizes) -> None:
    """Write what both begin with: tokenizer and weights as Hugging Face has them, and the conversations of a step."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    pairs = list(docstrings())
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    vocab = max(sizes.model.model["vocab_size"], 320)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator((text for pair in pairs for text in pair), learn)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END).save_pretrained(folder)
    work = dataclasses.replace(sizes.model, model=sizes.model.model | {"vocab_size": words.get_vocab_size()})
    model = hugging_face_model(work)
    model.config.eos_token_id = model.generation_config.eos_token_id = words.token_to_id(END)
    model.config.use_cache = True
    model.save_pretrained(folder)
    fits = [(q, a) for q, a in pairs if len(words.encode(q + a).ids) < sizes.longest]
    some = fits[:: max(len(fits) // sizes.conversations, 1)][: sizes.conversations]
    lines = [json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in some]
    (folder / "conversations.jsonl").write_text("".join(lines), encoding="utf-8")


class Clock(Observer):
    """CPU-seconds of the steps after the first ones, and the loss of the first."""

    def __init__(self) -> None:
        self.began, self.seconds, self.loss = 0.0, 0.0, 0.0

    def after_step(self, step: Step) -> None:
        if step.iteration == 1 and step.report is not None:
            self.loss = next(iter(step.report.losses.values()))
        self.tick(step.iteration)

    def tick(self, iteration: int) -> None:
        """A step has ended."""
        if iteration == WARMUPS:
            self.began = time.process_time()
        self.seconds = time.process_time() - self.began


def ours(task: str, folder: Path, sizes: Sizes, flags: str) -> Clock:
    """Train by our trainer."""
    common = (
        f"--load {folder} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --lr 1e-5 "
        f"--lr-decay-style constant --train-iters {WARMUPS + sizes.steps} --weight-decay 0 "
    )
    trainer: Trainer = build_trainer(parse_args((common + flags).split(), 1, task=task), task=TASKS[task], quiet=True)
    clock = Clock()
    trainer.observers = [clock, *trainer.observers]
    try:
        trainer.train()
    finally:
        trainer.close()
    return clock


def our_sft(folder: Path, sizes: Sizes) -> Clock:
    """Packed rows: as many tokens a microbatch as theirs has at most, and all conversations in a step."""
    flags = f"--data-path {folder}/conversations.jsonl --split 100 --sequence-packing --seq-length {sizes.longest} "
    one = parse_args(
        f"--load {folder} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --train-iters 1 "
        f"--global-batch-size 1 --micro-batch-size 1 {flags}".split(), 1, task="sft",
    )  # fmt: skip
    trainer = build_trainer(one, task=TASKS["sft"], quiet=True)
    rows = trainer.train_set
    assert isinstance(rows, RowDataset)
    trainer.close()
    micro = math.gcd(rows.epoch_rows, sizes.micro_batch)
    return ours("sft", folder, sizes, f"{flags} --global-batch-size {rows.epoch_rows} --micro-batch-size {micro}")


def our_grpo(folder: Path, sizes: Sizes) -> Clock:
    """One update a rollout."""
    answers = sizes.prompts * sizes.group
    return ours(
        "grpo",
        folder,
        sizes,
        f"--environment sums --grpo-prompts-per-step {sizes.prompts} --grpo-group-size {sizes.group} "
        f"--max-completion-length {sizes.answer} --seq-length {sizes.answer + 8} --global-batch-size {answers} "
        f"--micro-batch-size {min(answers, 64)} --rl-max-num-seqs {answers}",
    )


def theirs(make: Any, config: Any, **given: Any) -> Clock:
    """Train by a trainer of TRL."""
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    clock = Clock()

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.tick(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.global_step == 1:
                clock.loss = logs["loss"]

    trainer = make(args=config, **given)
    trainer.remove_callback(PrinterCallback), trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Ticks())
    trainer.train()
    return clock


def their_arguments(folder: Path, sizes: Sizes, **own: Any) -> dict[str, Any]:
    """What both configurations of TRL have."""
    return {
        "output_dir": str(folder / "out"), "max_steps": WARMUPS + sizes.steps, "learning_rate": 1e-5,
        "lr_scheduler_type": "constant", "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "gradient_checkpointing": False, "bf16": False, "disable_tqdm": True, **own,
    }  # fmt: skip


def their_sft(folder: Path, sizes: Sizes, packing: bool) -> Clock:
    """The same conversations in each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    lines = [json.loads(line) for line in (folder / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
    micro = sizes.micro_batch
    config = SFTConfig(
        **their_arguments(folder, sizes),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=sizes.conversations // micro,
        max_length=sizes.longest,
        packing=packing,
        dataset_num_proc=None,
    )
    if packing:  # a row is a sample now: as many rows as they make of the conversations
        config.per_device_train_batch_size, config.gradient_accumulation_steps = 1, packed_rows(folder, sizes, lines)
    return theirs(
        SFTTrainer,
        config,
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(lines),
    )


def packed_rows(folder: Path, sizes: Sizes, lines: list[dict[str, str]]) -> int:
    """How many rows TRL packs the conversations into."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.data_utils import pack_dataset

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(line["prompt"] + line["completion"] + END)["input_ids"] for line in lines]
    return len(pack_dataset(Dataset.from_dict({"input_ids": ids}), sizes.longest))


def their_grpo(folder: Path, sizes: Sizes) -> Clock:
    """The same prompts and lengths."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    environment = Sums()
    problems = list(environment.problems(held_out=False))
    answers = sizes.prompts * sizes.group

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

    micro = min(answers, 64)
    config = GRPOConfig(
        **their_arguments(folder, sizes),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=answers // micro,
        num_generations=sizes.group,
        max_completion_length=sizes.answer,
        beta=0.0,
        temperature=1.0,
    )
    return theirs(
        GRPOTrainer,
        config,
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
    )


COMPARISONS = {
    "sft": (our_sft, lambda folder, sizes: their_sft(folder, sizes, packing=False)),
    "sft packed": (our_sft, lambda folder, sizes: their_sft(folder, sizes, packing=True)),
    "grpo": (our_grpo, their_grpo),
}


def compare(name: str, folder: Path, sizes: Sizes, pairs: int) -> str:
    """One comparison; a line for `RECORDS.md`.

    Raises:
        SystemExit: the first losses of `sft` are not equal.
    """
    a, b = COMPARISONS[name]
    mine, his = a(folder, sizes).loss, b(folder, sizes).loss
    if name == "sft" and not math.isclose(mine, his, rel_tol=1e-3):  # TRL logs four digits
        raise SystemExit(f"{name}: the first loss is {mine:.4f}, and theirs {his:.4f}: there is nothing to compare")
    ratio = paired(lambda: a(folder, sizes).seconds, lambda: b(folder, sizes).seconds, pairs, warmups=0)
    each = f"{ratio.a / sizes.steps:.2f} against {ratio.b / sizes.steps:.2f} CPU-seconds a step"
    return f"{name}: {ratio}; {each}; first loss {mine:.4f}, theirs {his:.4f}; load {os.getloadavg()[0]:.1f}"


def quiet() -> None:
    """No warnings and no progress bars."""
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    warnings.filterwarnings("ignore"), logging.disable(logging.WARNING)
    disable_progress_bars(), disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", nargs="*", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    procs.keep_memory()
    sizes, pairs = (SMALL, 2) if args.smoke else (LARGE, args.pairs)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(folder, sizes)
        size = count_parameters(sizes.model.config) / 1e6
        print(
            f"torch {torch.__version__}, {platform.machine()}, 1 thread; {size:.1f} M-parameter Llama in fp32; "
            f"{sizes.conversations} conversations a step of at most {sizes.longest} tokens; {sizes.prompts} x "
            f"{sizes.group} answers of {sizes.answer} tokens; median of {pairs} A B B A pairs (quartiles)"
        )
        for name in args.only:
            print(compare(name, folder, sizes, pairs), flush=True)


if __name__ == "__main__":
    main()
