"""A run that goes on trains on the samples that it would have had: over epochs, over blends, whoever reads ahead.

Two files of 12 and 7 samples, blended 7 to 3, give a run 64 samples: four epochs of the one, three of the other. The
loader has always read three microbatches more than were trained on, so a place in the data that was the loader's own
would be three too far.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minimegatron.data.blend import BlendedDataset
from minimegatron.data.indexed import IndexedDatasetBuilder
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.thorough import SLOW, mostly_thorough

SEQUENCE, AHEAD, STEPS, BATCH = 16, 3, 8, 8
SAMPLES = {"a": 12, "b": 7}
LINE = (
    f"--seq-length {SEQUENCE} --hidden-size 32 --num-attention-heads 2 --num-layers 1 --lr 1e-2 --split 100,0,0 "
    f"--tokenizer-type NullTokenizer --vocab-size 319 --micro-batch-size 1 --global-batch-size {BATCH} "
    f"--train-iters {STEPS} --lr-decay-iters {STEPS} --hidden-dropout 0.1 --attention-dropout 0.1"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Flags of a blend; no two tokens of both files are equal."""
    folder, token = tmp_path_factory.mktemp("blend"), 0
    for name, samples in SAMPLES.items():
        with IndexedDatasetBuilder(folder / f"{name}.bin", np.uint16) as builder:
            for length in (7, 12, 5, samples * SEQUENCE - 23):
                builder.add_document(range(token, token + length), [length])
                token += length
            builder.finalize(folder / f"{name}.idx")
    return f"--data-path 0.7 {folder}/a 0.3 {folder}/b"


def read_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    held: deque[Any] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > AHEAD:
            yield held.popleft()
    yield from held


def trained(rank: int, world: int, line: str) -> tuple[list[list[int]], list[Any], dict[str, list[torch.Tensor]]]:
    """Train; the tokens of every microbatch, the curve, and all that the run holds at its end."""
    trainer = build_trainer(parse_args(shlex.split(line), world), quiet=True)
    assert isinstance(trainer.train_set, BlendedDataset)
    real, seen = trainer._batches, []

    def noted(*args: Any) -> Iterator[Any]:
        for batch in read_ahead(real(*args)):
            seen.append(batch["tokens"][0].tolist())
            yield batch

    trainer._batches = noted  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    held = trainer.run_state.tensors()
    curve = [(report.losses["lm loss"], report.grad_norm) for report in trainer.history]
    return seen, curve, {name: [part.data.clone() for part in tensor.parts] for name, tensor in held.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stop", mostly_thorough(range(1, STEPS), [3]))
def test_epochs_and_blends_go_on_bit_for_bit_where_they_stopped(tmp_path, data, stop):
    seen, curve, final = trained(0, 1, f"{LINE} {data}")
    first, _, _ = trained(0, 1, f"{LINE} {data} --exit-interval {stop} --save {tmp_path}")
    after, curve_after, final_after = trained(0, 1, f"{LINE} {data} --load {tmp_path}")
    assert len(seen) == STEPS * BATCH and seen == first + after and curve[stop:] == curve_after
    assert final.keys() == final_after.keys()
    for name, parts in final.items():
        assert all(map(torch.equal, parts, final_after[name])), name
    of_a = [token < SEQUENCE * SAMPLES["a"] for sample in seen for token in sample]
    epochs = sum(of_a) / (SEQUENCE * SAMPLES["a"]), of_a.count(False) / (SEQUENCE * SAMPLES["b"])
    assert epochs[0] > 3 and epochs[1] > 2, "every file is read over and over"


@SLOW
def test_another_number_of_replicas_sees_the_same_samples_in_the_same_order(ranks, tmp_path, data):
    seen, _, _ = trained(0, 1, f"{LINE} {data}")
    trained(0, 1, f"{LINE} {data} --exit-interval 3 --save {tmp_path}")
    (even, _, _), (odd, _, _) = ranks(2).run(trained, f"{LINE} {data} --load {tmp_path}")
    assert [sample for pair in zip(even, odd, strict=True) for sample in pair] == seen[3 * BATCH :]
