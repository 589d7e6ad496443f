"""Conversations about pictures: what a row holds, which tokens count, and that a layout changes no number."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minimegatron.data.drawn import CELL, COLOURS, NUMBERS, drawn
from minimegatron.data.picture_messages import url_of
from minimegatron.errors import ConfigError, DataError
from minimegatron.posttraining.tasks import TASKS
from minimegatron.posttraining.vlm import HALF, VLM, made_tokenizer
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.trainer import Trainer
from tests.posttraining.test_tasks import near
from tests.thorough import mostly_thorough

SIZES = (
    "--hidden-size 32 --num-query-groups 2 --ffn-hidden-size 32 --vision-hidden-size 32 --vision-ffn-hidden-size 32 "
    "--seq-length 64 --global-batch-size 8 --lr 3e-3 --lr-decay-style constant --train-iters 2 "
)
MODEL = f"--preset laptop-vlm --mrope-section 1 1 2 {SIZES}"
CLIP = f"--preset laptop-llava {SIZES}"


def trainer_of(line: str, world: int = 1, model: str = MODEL) -> Trainer:
    run = parse_args(shlex.split(f"{model} {line}"), world, task="vlm")
    return build_trainer(run, task=TASKS["vlm"], quiet=True)


def curve(rank: int, world: int, line: str, model: str = MODEL) -> list[dict[str, float]]:
    """What each step reports."""
    trainer = trainer_of(line, world, model)
    try:
        trainer.train()
    finally:
        trainer.close()
    return [report.losses | {"norm": float(report.grad_norm or 0)} for report in trainer.history]


def test_an_answer_is_seen_in_the_picture():
    kinds = set()
    for number in range(60):
        picture, asked = drawn(7, number)
        kinds.add(asked[0].kind)
        cells = picture.reshape(picture.shape[0] // CELL, CELL, -1, CELL, 3).transpose(0, 2, 1, 3, 4)
        found, round_at = {}, None
        for row, of_row in enumerate(cells):
            for column, cell in enumerate(of_row):
                for name, colour in COLOURS.items():
                    if (cell[3, 3] == colour).all():
                        found[row, column] = name
                        if (cell[0, 3] == colour).all():
                            assert round_at is None, "one circle"
                            round_at = row, column
        assert round_at is not None
        row, column = round_at
        wanted = {"count": NUMBERS[len(found) - 1], "colour": found[round_at]}
        wanted |= {"row": NUMBERS[row], "column": NUMBERS[column]}
        assert {each.kind: each.answer for each in asked} == wanted
    assert len(kinds) == 4, "any question comes first"


def lines(path: Path, *messages: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps({"messages": some}) + "\n" for some in messages))
    return f"--data-path {path} --split 100 --tokenizer-type HuggingFaceTokenizer"


def asked(picture: np.ndarray | str, text: str, answer: str, more: tuple[np.ndarray, ...] = ()) -> list[dict[str, Any]]:
    urls = [one if isinstance(one, str) else url_of(one) for one in (picture, *more)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
        {"role": "assistant", "content": answer},
    ]


def test_a_row_has_room_for_its_pictures_and_counts_answers_alone(tmp_path):
    folder = made_tokenizer(str(tmp_path))
    one, other = (np.full((8 * n, 16, 3), 40 * n, dtype=np.uint8) for n in (2, 3))
    line = lines(tmp_path / "a.jsonl", asked(one, "Which?", "red", (other,)))
    trainer = trainer_of(f"{line} --tokenizer-model {folder}")
    batch, tokenizer = trainer.train_set.batch([0]), trainer.data.tokenizer
    trainer.close()
    token = 3  # of the preset, and <|image_pad|> of this tokenizer
    assert (batch["tokens"] == token).sum() == 2 * 2 + 3 * 2
    assert batch["pixels"].shape == (40, 48) and batch["patches"][-1, 2] == 1
    assert (batch["picture_rows"] >= 0).equal(batch["tokens"] == token)
    counted = batch["labels"][batch["loss_mask"] > 0].tolist()
    assert tokenizer.detokenize(counted[:-1]) == "red" and counted[-1] == tokenizer.eod
    first = batch["tokens"][0].tolist().index(token)
    places = batch["position_ids"][:, 0]
    assert places[:, first : first + 4].tolist() == [[first] * 4, [first, first, first + 1, first + 1],
                                                    [first, first + 1] * 2]  # fmt: skip
    assert (places[:, first + 4] == first + 2).all(), "the token behind it follows its longer side"


def test_a_picture_that_the_assistant_shows_is_refused(tmp_path):
    question, answer = asked(np.zeros((16, 16, 3), dtype=np.uint8), "Which?", "red")
    answer["content"] = [question["content"][0], {"type": "text", "text": "red"}]
    line = lines(tmp_path / "a.jsonl", [question, answer])
    with pytest.raises(DataError, match="a picture in a message of the assistant") as error:
        trainer_of(f"{line} --tokenizer-model {made_tokenizer(str(tmp_path))}")
    assert "a.jsonl" in str(error.value.where)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("https://example.org/cat.png", "is not read as a picture"),
        ("data:image/gif;base64,AAAA", "is not read as a picture"),
        ("data:image/png;base64,AAAA", "broken picture"),
        ("data:image/png;base64,A*", "broken picture"),
        (np.zeros((8, 2000, 3), dtype=np.uint8), "200 times"),
        (np.zeros((96, 96, 3), dtype=np.uint8), "a larger --seq-length|tokens with its pictures"),
    ],
)
def test_what_cannot_be_read_ends_the_run_with_its_place(tmp_path, picture, message):
    line = lines(tmp_path / "a.jsonl", asked(picture, "Which?", "red"))
    with pytest.raises(DataError, match=message) as error:
        trainer_of(f"{line} --tokenizer-model {made_tokenizer(str(tmp_path))}")
    assert "a.jsonl" in str(error.value.where)


def test_a_large_picture_becomes_smaller(tmp_path):
    line = lines(tmp_path / "a.jsonl", asked(np.zeros((96, 192, 3), dtype=np.uint8), "Which?", "red"))
    trainer = trainer_of(f"{line} --tokenizer-model {made_tokenizer(str(tmp_path))} --picture-max-tokens 8")
    batch = trainer.train_set.batch([0])
    trainer.close()
    assert (batch["picture_rows"] >= 0).sum() == 8


def test_another_picture_token_or_another_model_is_refused(tmp_path):
    with pytest.raises(DataError, match="has 0 picture tokens, of id 9"):
        trainer_of(f"--examples drawn --corpus-path {tmp_path} --image-token-id 9")
    words = "--num-layers 1 --hidden-size 32 --seq-length 48 --train-iters 1 --examples drawn --global-batch-size 8"
    with pytest.raises(ConfigError, match="has no vision encoder"):
        build_trainer(parse_args(shlex.split(words), 1, task="vlm"), task=TASKS["vlm"], quiet=True)


def test_an_encoder_of_one_size_sees_pictures_of_it(tmp_path):
    size = f"--preset laptop-llava --examples drawn --corpus-path {tmp_path} --seq-length 64 --micro-batch-size 2"
    run = parse_args(shlex.split(size), 1, task="vlm")
    trainer = build_trainer(run, task=TASKS["vlm"], quiet=True)
    batch = trainer.train_set.batch([0, 1])
    trainer.close()
    assert batch["pixels"].shape == (2 * 17, 3 * 8 * 8) and (batch["picture_rows"] >= 0).sum() == 2 * 16
    assert (batch["patches"][:, 0] < 0).nonzero().flatten().tolist() == [0, 17] and batch["position_ids"].dim() == 2
    with pytest.raises(ConfigError, match="pictures of 40 pixels"):
        build_trainer(
            parse_args(shlex.split(f"{size} --vision-image-size 40"), 1, task="vlm"), task=TASKS["vlm"], quiet=True
        )


def test_accuracy_counts_answers_that_greedy_decoding_would_give():
    task = VLM(parse_args(shlex.split(f"{MODEL} --examples drawn"), 1, task="vlm"))
    task.ends = torch.tensor([0])
    batch = {"labels": torch.tensor([[5, 6, 7, 0, 8]]), "loss_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])}
    _, count, report = task._summed(batch, torch.tensor([[0.0, HALF / 2, 2 * HALF, 0.0, 0.1]]))
    assert count == 4 and report["accuracy"].tolist() == [2, 3]


TP = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = [
    f"{TP} --micro-batch-size 4",
    "--context-parallel-size 2 --micro-batch-size 4",
    "--pipeline-model-parallel-size 2 --micro-batch-size 2",
    "--micro-batch-size 2 --data-parallel-sharding-strategy optim_grads_params",
    "--micro-batch-size 4 --freeze vision_model.* decoder.*",
]


@pytest.mark.parametrize("layout", mostly_thorough(LAYOUTS, [1]))
def test_every_layout_is_the_serial_one(ranks, tmp_path, layout):
    line = f"--examples drawn --corpus-path {tmp_path}"
    frozen = layout[layout.find("--freeze") :] if "--freeze" in layout else ""
    serial = curve(0, 1, f"{line} --micro-batch-size 8 {frozen}")
    for found in ranks(2).run(curve, f"{line} {layout}"):
        near(found, serial)


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    line = f"--examples drawn --corpus-path {tmp_path} --micro-batch-size 8 --save {tmp_path}"
    curves = [curve(0, 1, f"{line}/{n}") for n in ("whole", "cut --exit-interval 1")]
    curves.append(curve(0, 1, f"{line}/cut --load {tmp_path}/cut"))
    assert len(curves[1]) == 1 and curves[1] + curves[2] == curves[0]
