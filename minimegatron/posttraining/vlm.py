"""Conversations about pictures: fine-tuning of a model that sees.

A line is that of `sft`, with pictures as OpenAI's chat has them:

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
                                               {"type": "text", "text": "What is this?"}]},
                  {"role": "assistant", "content": "A cat."}]}

The chat template writes one picture token for each picture; it becomes as many as the picture has blocks of patches
(`data/pictures`), and none of them counts in the loss. A row is one conversation. A conversation that is longer than a
row is refused: without its end a picture would be another one. `--examples drawn` needs no file: pictures that the
program draws, endlessly, with questions (`data/drawn`).

Beside the loss a step reports `accuracy`: the share of answer tokens whose probability is above one half. Such a token
is the one that greedy decoding takes, so greedy decoding is right at least as often; and it follows from the losses of
the tokens, so it costs no message, whatever the layout.

Megatron-LM: `examples/multimodal/train.py`, `examples/multimodal/dataset_helpers.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.data.builder import parse_split
from minimegatron.data.documents import reader_of
from minimegatron.data.drawn import CELL, COLOURS, NUMBERS, QUESTIONS, drawn
from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.data.picture_messages import decoded, resized, with_room, without_pictures
from minimegatron.data.pictures import Seen, patches_of, picture_inputs
from minimegatron.data.publish import build_once
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.data.tokenizer_training import train_bpe
from minimegatron.errors import DataError, require
from minimegatron.posttraining.conversations import Encoder, Tokens
from minimegatron.posttraining.data import chosen, template_of, tokenizer_of
from minimegatron.training import step
from minimegatron.training.datasets import Joint, RunData, file_fact, load_on_rank_zero_first, vocab_size_of
from minimegatron.training.step import Loss, LossFunc, loss_func
from minimegatron.training.task import Task

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# A conversation in plain words, with a place for pictures.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}"
    "{{ m.role | capitalize }}: {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + PICTURE + "{% endif %}{% endfor %}{% endif %}{{ '\\n' }}"
    "{% endif %}{% endfor %}"
)
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # ids 2, 3, 4 of the tokenizer made here
HALF = math.log(2.0)


class Line(NamedTuple):
    """A conversation: messages with `{"type": "image"}` in place of each picture, and the pictures."""

    messages: list[dict[str, Any]]
    pictures: Sequence[np.ndarray]


class VLM(Task):
    """Conversations about pictures, of which the assistant's tokens count."""

    def load_data(
        self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
    ) -> RunData:
        """Rows of `--data-path FILE.jsonl ...` or of `--examples drawn`; all ranks call it.

        Raises:
            ConfigError, DataError: on every rank.
        """
        data = load_on_rank_zero_first(lambda progress: _load(run, num_samples), mesh, quiet)
        assert isinstance(data.tokenizer, HuggingFaceTokenizer), "a chat template comes with one"
        self.ends = torch.tensor(sorted(data.tokenizer.special_ids))
        return data

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        """The model's losses of the next microbatch, and the function that sums them and counts right answers."""
        batch = next(data_iterator)
        output, _ = step.forward_step(iter([batch]), model)
        return output, functools.partial(self._summed, batch)

    def _summed(self, batch: Batch, output: torch.Tensor) -> Loss:
        loss, count, report = loss_func(batch["loss_mask"], output)
        answers = (batch["loss_mask"] > 0) & ~torch.isin(batch["labels"], self.ends.to(output.device))
        right = (output.detach() < HALF) & answers
        return loss, count, {**report, "accuracy": torch.stack([right.sum().double(), answers.sum().double()])}


def _load(run: RunConfig, num_samples: tuple[int, int, int]) -> RunData:
    data, config = run.data, run.model
    require(
        config.sees, "minimegatron vlm with a model that has no vision encoder", "--preset laptop-vlm, or --load one"
    )
    if run.task.examples is not None and data.tokenizer_type is None and run.checkpoint.load is None:
        made = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": made_tokenizer(data.corpus_path)}
        run = dataclasses.replace(run, data=data.replace(**made))
    tokenizer, folder = tokenizer_of(run)
    encoder = Encoder(tokenizer, template_of(run, tokenizer))
    rows = functools.partial(PictureRows, encoder, config, data.seq_length)
    seed, sets = run.training.seed, list[PictureRows | None]()
    files: tuple[str, ...] = ()
    trained_on: tuple[tuple[str, str], ...]
    if run.task.examples is not None:
        size = config.vision_image_size
        require(
            size in (None, 2 * CELL, 3 * CELL, 4 * CELL),
            f"--examples drawn for an encoder of pictures of {size} pixels",
            f"vision_image_size={4 * CELL}, or fewer cells of {CELL} pixels",
        )
        for part, wanted in enumerate(num_samples):
            read = functools.partial(_drawn, 3 * seed + part, cells=None if size is None else size // CELL)
            sets.append(rows(read, wanted, wanted, None, "drawn pictures") if wanted else None)
        trained_on = ((f"drawn with seed {seed}", "drawn pictures"),)
    else:
        per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
        files = tuple(sorted({path for paths in (data.data_path, *per_split) for path in paths}))
        if data.per_split:
            lines = [_lines(paths) for paths in per_split]
        else:
            everything = _lines(data.data_path)
            edges = [part or (0.0, 0.0) for part in parse_split(data.split)]
            lines = [everything[round(a * len(everything)) : round(b * len(everything))] for a, b in edges]
        read_one = functools.partial(_line, most=run.task.picture_max_tokens, config=config)
        for some, wanted in zip(lines, num_samples, strict=True):
            read = functools.partial(read_one, some)
            sets.append(rows(read, len(some), wanted, seed, " ".join(files)) if some and wanted else None)
        trained_on = tuple((file_fact(path), path) for path in (data.train_data_path or data.data_path))
    train, valid, test = sets
    if train is not None:
        train.batch([0])  # a template or a length that does not fit ends the run here, on every rank
    return RunData(tokenizer, vocab_size_of(tokenizer, chosen(run)), train, valid, test, files, trained_on, folder)


def made_tokenizer(folder: str) -> str:
    """The folder of a tokenizer with picture tokens and a chat template, made once below `folder`."""
    words = [*QUESTIONS.values(), *COLOURS, *NUMBERS, *(f"User: {asked}" for asked in QUESTIONS.values()), "System: "]
    made_of = hashlib.blake2b(repr((words, TEMPLATE, SPECIAL)).encode(), digest_size=4).hexdigest()
    home = os.path.join(folder, f"drawn-pictures-{made_of}")

    def build(stage: str) -> None:
        train_bpe(words * 2, 512, os.path.join(stage, "tokenizer"), TEMPLATE, SPECIAL)

    build_once(home, build)
    return os.path.join(home, "tokenizer")


def _drawn(seed: int, number: int, cells: int | None) -> Line:
    picture, asked = drawn(seed, number, cells)
    messages: list[dict[str, Any]] = []
    for _, question, answer in asked:
        look = [] if messages else [{"type": "image"}]
        messages.append({"role": "user", "content": [*look, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": answer})
    return Line(messages, [picture])


Numbered = tuple[str, bytes]  # file and number of a line, the line


def _lines(paths: Sequence[str]) -> list[Numbered]:
    """The lines of files. Every rank keeps them all, pictures included."""
    found: list[Numbered] = []
    for path in paths:
        for line in reader_of(path):
            if line.data is None:
                raise DataError("the line is too long", where=f"{path}:{line.number}", fix="smaller pictures")
            found.append((f"{path}:{line.number}", line.data))
    return found


def _line(lines: Sequence[Numbered], number: int, most: int, config: TransformerConfig) -> Line:
    where, data = lines[number]
    try:
        line = json.loads(data)
        if not isinstance(line, dict) or not isinstance(line.get("messages"), list):
            raise DataError("no list of `messages`", fix='{"messages": [{"role": ..., "content": ...}, ...]}')
        messages, urls = without_pictures(line["messages"])
        shown = (message for message in messages if message.get("role") == "assistant")
        if any({"type": "image"} in message["content"] for message in shown if isinstance(message["content"], list)):
            raise DataError(
                "a picture in a message of the assistant: its tokens would count, and no model here draws",
                fix="let the user show it",
            )
        return Line(messages, [resized(decoded(url), config, most) for url in urls])
    except (ValueError, DataError) as error:
        what, fix = (error.what, error.fix) if isinstance(error, DataError) else (f"bad JSON: {error}", "mend the line")
        raise DataError(what, where=where, fix=fix) from error


class PictureRows(Dataset):
    """Conversations with pictures, one a row, epoch after epoch.

    Args:
        encoder: messages to ids.
        config: the model that sees.
        sequence_length: s.
        read: number of a conversation -> the conversation.
        count: conversations of an epoch.
        num_samples: at least this many rows.
        seed: of the order in each epoch; None for the order of the numbers.
        name: for the log.
    """

    known = False

    def __init__(
        self,
        encoder: Encoder,
        config: TransformerConfig,
        sequence_length: int,
        read: Callable[[int], Line],
        count: int,
        num_samples: int,
        seed: int | None,
        name: str,
    ) -> None:
        self.encoder, self.config, self.sequence_length, self.read = encoder, config, sequence_length, read
        self.count, self.seed, self.label = count, seed, name
        self.num_epochs = max(1, -(-num_samples // count))
        self.tokens_of = functools.lru_cache(maxsize=8192)(self._tokens_of)
        self.order_of = functools.lru_cache(maxsize=2)(self._order_of)

    @property
    def name(self) -> str:
        return self.label

    def __len__(self) -> int:
        return self.num_epochs * self.count

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        return {self.label: samples / self.count}

    def begun(self, first: int, end: int) -> dict[str, int]:
        """{name: the last epoch, from 0, that begins in samples [first, end)}; {} if no epoch but the first does."""
        last = (end - 1) // self.count
        return {self.label: last} if last > ((first - 1) // self.count if first else 0) else {}

    def batch(self, samples: Sequence[int]) -> Batch:
        """tokens, labels: [b, s] int64; loss_mask: [b, s] float32; and what `picture_inputs` gives.

        Raises:
            DataError: a conversation is longer than a row, or does not fit its pictures; with its number.
        """
        rows, labels, masks = [], [], []
        for k in samples:
            epoch, place = divmod(k, self.count)
            ids, counts, pictures = self._encoded(place if self.seed is None else int(self.order_of(epoch)[place]))
            padding = self.sequence_length + 1 - len(ids)
            rows.append([Seen(ids[:-1], pictures), Seen(ids.new_full((padding,), self._padding))])
            labels.append(torch.cat([ids[1:], ids.new_full((padding,), self._padding)]))
            masks.append(torch.cat([counts[1:], torch.zeros(padding)]))
        tokens = torch.stack([torch.cat([seen.ids for seen in row]) for row in rows])
        inputs = picture_inputs(rows, self.config)
        return {"tokens": tokens, "labels": torch.stack(labels), "loss_mask": torch.stack(masks), **inputs}

    @property
    def _padding(self) -> int:
        return 1 if self.config.image_token_id == 0 else 0

    def _encoded(self, number: int) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        """(ids, which count, patches of the pictures) of a conversation."""
        line = self.read(number)
        tokens = self.tokens_of(json.dumps(line.messages))
        pictures = [patches_of(picture, self.config) for picture in line.pictures]
        try:
            times = [n for _, n in with_room(tokens.ids, [grid for _, grid in pictures], self.config)]
            if sum(times) > self.sequence_length + 1:
                raise DataError(
                    f"a conversation of {sum(times)} tokens with its pictures, of {self.sequence_length + 1} in a row",
                    fix="a larger --seq-length, or a smaller --picture-max-tokens",
                )
        except DataError as error:
            raise DataError(error.what, where=f"{self.label}, conversation {number}", fix=error.fix) from error
        repeats = torch.tensor(times)
        ids = torch.tensor(tokens.ids).repeat_interleave(repeats)
        counts = torch.tensor(tokens.counts).repeat_interleave(repeats).float()
        return ids, counts, pictures

    def _tokens_of(self, messages: str) -> Tokens:
        return self.encoder.template.encode(json.loads(messages))

    def _order_of(self, epoch: int) -> np.ndarray:
        assert self.seed is not None, "asked where there is an order"
        return np.random.default_rng([self.seed, epoch]).permutation(self.count)
