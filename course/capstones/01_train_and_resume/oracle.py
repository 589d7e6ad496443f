"""What the judge knows by itself: the text that is held out, and what transformers computes from an exported model.

    corpus --> held-out documents (drawn) | the rest --> {data}.bin/.idx, {tokenizer}

| question                                  | answered by                                                            |
|-------------------------------------------|------------------------------------------------------------------------|
| which samples did the step after c read?  | transformers' loss of samples cB ... cB + B - 1 on the weights after c |
| are exported weights the checkpoint's?    | logits of transformers and of this package, of the same tokens         |
| how good is the model?                    | transformers' bits per byte of the held-out text                       |

The loss of the step after c is known before it is taken, so a log that says another number has read other samples or
begins with other weights. transformers shares no code with the training.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from labkit.acceptance import Missed, require
from minimegatron.checkpoint.conversion import open_model
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.data.corpus import prepare_corpus
from minimegatron.data.preprocess import preprocess
from minimegatron.inference.loading import load
from minimegatron.models.chunks import count_parameters
from minimegatron.training.arguments import parse_args
from minimegatron.training.datasets import load_data

VOCABULARY, HELD_OUT = 1024, 0.1  # tokens; of the documents
BATCH = 32  # windows at once
LOGITS = 1e-3  # between transformers' and ours, in fp32, over the largest


class Data:
    """The judge's data.

    Args:
        random: draws the documents that are held out.
        folder: where files are written.

    Attributes:
        words: what commands are given: `data`, `tokenizer`.
        held_out: the documents that nobody trains on.
    """

    def __init__(self, random: Random, folder: Path) -> None:
        corpus = prepare_corpus(folder / "corpus", VOCABULARY, "docs")
        lines = Path(corpus.jsonl).read_text(encoding="utf-8").splitlines(keepends=True)
        chosen = set(random.sample(range(len(lines)), max(1, int(HELD_OUT * len(lines)))))
        self.held_out = [json.loads(lines[i])["text"] for i in sorted(chosen)]
        (folder / "train.jsonl").write_text("".join(lines[i] for i in range(len(lines)) if i not in chosen), "utf-8")
        arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": corpus.tokenizer_model}
        preprocess([str(folder / "train.jsonl")], str(folder / "train"), arguments, append_eod=True)
        self.words = {"data": folder / "train_text_document", "tokenizer": corpus.tokenizer_model}
        self.tokenizer = corpus.tokenizer()


def parameters(config: TransformerConfig) -> int:
    """Of a model, its vocabulary without padding; a matrix that is used twice counts once."""
    return count_parameters(config)


def exported(folder: Path) -> Any:
    """transformers' model of a folder, in fp32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # whatever transformers may raise at a folder
        raise Missed(f"transformers does not load the exported folder: {type(error).__name__}: {error}") from error


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, V] of an exported model.

    Raises:
        Missed: it does not compute them.
    """
    try:
        logits: torch.Tensor = model(input_ids=tokens).logits
    except Exception as error:  # a vocabulary that is too small, positions that are too few
        raise Missed(f"the exported model does not compute: {type(error).__name__}: {error}") from error
    return logits


@torch.no_grad()
def loss_of(model: Any, batch: Mapping[str, torch.Tensor]) -> float:
    """The mean loss of the tokens of a batch that count, as `training/step` means it."""
    logits = torch.cat([logits_of(model, tokens) for tokens in batch["tokens"].split(BATCH)])
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten().double()
    return float((losses.double() * mask).sum() / mask.sum())


def samples_of(config: Mapping[str, Any], samples: int) -> Any:
    """The training set of a run, of so many samples: sample k is the same whoever reads it.

    Args:
        config: a run's, as its log begins with it.
        samples: of all its steps.
    """
    sections = {name: value for name, value in config.items() if name not in ("event", "machine")}
    sections = {**sections, "checkpoint": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(sections))
        run = parse_args(["--config", str(path)], world_size=config["machine"]["world_size"])
    joint = samples if run.data.sample_order == "megatron" else None
    data = load_data(run, Mesh.serial(), (samples, 0, 0), (joint, None, None), quiet=True)
    assert data.train is not None
    return data.train


def read_after(model: Any, train: Any, done: int, size: int, loss: float, tolerance: float) -> str:
    """Which samples a step has read whose loss is known; "" if they are the next ones.

    Args:
        model: transformers', with the weights before the step.
        train: the training set.
        done: steps before.
        size: samples of a step.
        loss: that was logged.
        tolerance: of the loss.
    """
    guesses = {0: "", -done: "the first ones: the data began again", -1: "those of the step before, read twice"}
    guesses[1] = "those of the step after: a batch was left out"
    found = {}
    for steps, told in guesses.items():
        first = (done + steps) * size
        if 0 <= first <= len(train) - size:
            found[told] = loss_of(model, train.batch(range(first, first + size)))
    right = found[""]
    if abs(right - loss) <= tolerance:
        return ""
    near = [told for told, value in found.items() if told and abs(value - loss) <= tolerance]
    samples = f"samples {done * size} to {(done + 1) * size - 1} have the loss {right:.4f} on these weights"
    return f"{samples}, and {loss:.4f} was logged: " + (near[0] if near else "other samples, or other weights")


def bits_per_byte(model: Any, tokenizer: Any, texts: Sequence[str], length: int) -> float:
    """Of held-out documents, each read in windows that do not overlap, its first token from the end of a document."""
    nats = 0.0
    for batch in _windows(tokenizer, texts, length):
        nats += loss_of(model, batch) * float(batch["loss_mask"].sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def _windows(tokenizer: Any, texts: Sequence[str], length: int) -> Iterator[dict[str, torch.Tensor]]:
    rows = []
    for text in texts:
        read = [tokenizer.eod, *tokenizer.tokenize(text)]
        rows += [read[i : i + length + 1] for i in range(0, len(read) - 1, length)]
    for first in range(0, len(rows), BATCH):
        some = rows[first : first + BATCH]
        ids = torch.zeros(len(some), max(map(len, some)), dtype=torch.long)
        mask = torch.zeros(ids.shape[0], ids.shape[1] - 1)
        for row, padded, counts in zip(some, ids, mask, strict=True):
            padded[: len(row)] = torch.tensor(row)
            counts[: len(row) - 1] = 1
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask}


@torch.no_grad()
def check_export(save: Path, model: Any, tokens: torch.Tensor) -> str:
    """Hold transformers' logits against this package's.

    Args:
        save: folder of the checkpoints; the newest one counts.
        model: transformers', of the exported folder.
        tokens: [b, s].

    Raises:
        Missed: they differ.
        CheckpointError: there is no checkpoint.
    """
    ours = load(open_model(save), Mesh.serial(), "fp32")
    logits = ours(tokens).transpose(0, 1)[..., : model.config.vocab_size].float()
    theirs = logits_of(model, tokens)
    require(theirs.shape == logits.shape, f"the exported model has logits {list(theirs.shape)}, the checkpoint "
            f"{list(logits.shape)}")  # fmt: skip
    gap = float((theirs - logits).abs().max() / logits.abs().max())
    require(
        gap <= LOGITS, f"logits of the exported model and of the newest checkpoint differ by {gap:.2g} of the largest"
    )
    return f"logits of {tokens.numel()} tokens agree to {gap:.1g} of the largest"


def same_weights(one: Path, other: Path) -> str:
    """The first weight that differs in the newest checkpoints of two folders; "" if all bits are equal."""
    a, b = open_model(one).weights, open_model(other).weights
    for name in a.tensors:
        if name not in b.tensors or not torch.equal(a.read(name), b.read(name)):
            return name
    return ""
