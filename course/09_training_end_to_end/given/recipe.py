"""The recipe of lab 09: stories to files, flags to a trainer; in the kernel and on ranks alike."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minimegatron.data.preprocess import preprocess
from minimegatron.data.tokenizer_training import train_bpe
from minimegatron.optim.schedule import Schedule
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.trainer import Trainer

S = 32  # tokens of a sample
FLAGS = (
    "--num-layers 1 --num-attention-heads 1 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--seq-length {S} --max-position-embeddings {S} --make-vocab-size-divisible-by 1 --tokenizer-type "
    "HuggingFaceTokenizer --split 900,100 --eval-iters 24 --eval-interval 100000 --weight-decay 0 --adam-beta2 0.95 "
    "--clip-grad 0 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-warmup-iters 20 --min-lr 0.0002"
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What became of a corpus."""

    tokens: int
    vocab_size: int


def prepare(folder: str | Path, texts: list[str], name: str = "stories") -> Prepared:
    """JSONL, a tokenizer (once a folder) and `.bin/.idx` of these texts."""
    folder = Path(folder)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_bpe(texts[:1000], 1024, folder / "tokenizer")
    arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer")}
    made = preprocess([str(folder / f"{name}.jsonl")], str(folder / name), arguments, append_eod=True)
    return Prepared(made.tokens, tokenizer.vocab_size)


def trainer(
    folder: str | Path, flags: str = "", h: int = 24, iters: int = 120, ranks: int = 1, seed: int = 1, batch: int = 16,
    name: str = "stories", **build: Any,
) -> Trainer:  # fmt: skip
    """The trainer of a model of width h; later flags win."""
    line = (
        f"{FLAGS} --hidden-size {h} --ffn-hidden-size {2 * h} --init-method-std {0.3 / h**0.5} --lr {0.08 / h**0.5} "
        f"--global-batch-size {batch} --micro-batch-size {batch // ranks} --train-iters {iters} --lr-wsd-decay-iters "
        f"{iters * 2 // 5} --data-path {folder}/{name}_text_document --tokenizer-model {folder}/tokenizer "
        f"--seed {seed} {flags}"
    )
    return build_trainer(parse_args(shlex.split(line), ranks), quiet=True, **build)


def follow(trainer: Trainer, rate: Callable[[int], float]) -> Trainer:
    """Let a trainer take the rate of step n from `rate(n)`; the package counts samples."""
    size = trainer.batch_sizes.global_batch_size

    class Followed(Schedule):
        def lr_at(self, step: int, max_lr: float | None = None, min_lr: float | None = None) -> float:
            return rate(step // size)

    trainer.scheduler.schedule = Followed(**dataclasses.asdict(trainer.scheduler.schedule))
    trainer.scheduler.step(0)
    return trainer


def log_of(trainer: Trainer, steps: int, since: int = 0) -> dict[str, list[float]]:
    """What the log has of `steps` steps of a run: first sample, rate, loss scale, loss, norm before clipping."""
    size, reports = trainer.batch_sizes.global_batch_size, trainer.history[since : since + steps]
    begun = trainer.state.iteration - len(trainer.history) + since
    return {
        "first": [size * (begun + i) for i in range(steps)],
        "rate": [one.learning_rate for one in reports],
        "scale": [one.loss_scale for one in reports],
        "loss": [one.losses["lm loss"] for one in reports],
        "norm": [one.grad_norm or 0.0 for one in reports],
    }
