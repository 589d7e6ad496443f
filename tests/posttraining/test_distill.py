"""Divergences are torch's, over a cut vocabulary and in chunks, with one tensor of logits; layouts agree."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.posttraining.distill import divergence
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.posttraining.test_tasks import MODEL, curve, near, trainer_of
from tests.thorough import mostly_thorough

V, PADDED, N = 11, 16, 7


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student's and teacher's logits, labels, and the weight of each token."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, N, PADDED, generator=generator)
    return student, teacher, torch.randint(0, V, (N,), generator=generator), torch.rand(N, generator=generator)


def plain(student: torch.Tensor, kind: str, temperature: float, a: float) -> torch.Tensor:
    """The loss of every token by torch's functions, on the words alone."""
    _, teacher, labels, _ = tensors()
    log_q, log_p = (F.log_softmax(z[:, :V].double() / temperature, -1) for z in (student, teacher))
    target, given = (log_p, log_q) if kind == "forward" else (log_q, log_p)
    kl = F.kl_div(given, target, reduction="none", log_target=True).sum(-1)
    return (1 - a) * kl + a * F.cross_entropy(student[:, :V].double(), labels, reduction="none")


def on_ranks(rank: int, world: int, kind: str, temperature: float, a: float, chunk: int) -> tuple[Any, Any, bool]:
    """Losses, this rank's gradient, and whether it lies where the logits were."""
    tp = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    student, teacher, labels, weights = tensors()
    width = PADDED // world
    mine = slice(rank * width, (rank + 1) * width)
    logits = student[:, mine].clone().requires_grad_()
    inner = logits * 1.0  # what an output layer gives: no leaf
    options: dict[str, Any] = {
        "vocab_size": V,
        "kind": kind,
        "temperature": temperature,
        "label_weight": a,
        "chunk": chunk,
    }
    loss, _, _ = divergence(inner, labels, lambda i, j: teacher[i:j, mine], tp, **options)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), inner)
    return loss.detach(), gradient.clone(), gradient.data_ptr() == inner.data_ptr()


@pytest.mark.parametrize("a", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_divergence_and_gradient_are_torchs(ranks: Any, kind: str, temperature: float, a: float) -> None:
    student, _, _, weights = tensors()
    student = student.requires_grad_()
    want = plain(student, kind, temperature, a)
    (gradient,) = torch.autograd.grad((want * weights).sum(), student)
    found = [on_ranks(0, 1, kind, temperature, a, 3)]
    both = ranks(2).run(on_ranks, kind, temperature, a, 3)
    found.append((both[0][0], torch.cat([one[1] for one in both], 1), all(one[2] for one in both)))
    for loss, of_logits, in_place in found:
        assert torch.allclose(loss.double(), want.detach(), atol=1e-5)
        assert torch.allclose(of_logits, gradient, atol=1e-6) and in_place
        assert not of_logits[:, V:].any()


TEACHER = "--num-layers 4 --hidden-size 48 --ffn-hidden-size 64"
LAYOUTS = [
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"),
    (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
    (2, "--context-parallel-size 2 --micro-batch-size 4"),
    (2, "--micro-batch-size 2 --data-parallel-sharding-strategy optim_grads_params"),
]


@pytest.mark.parametrize(("world", "layout"), mostly_thorough(LAYOUTS, (0, 1)))
def test_every_layout_is_the_serial_one(
    ranks: Any,
    files: dict[str, str],
    tmp_path: Path,
    world: int,
    layout: str,
) -> None:
    line = f"--global-batch-size 8 --train-iters 2 --split 90,10 --eval-interval 2 --eval-iters 1 {files['sft']}"
    teacher = trainer_of("sft", f"{line} {TEACHER} --micro-batch-size 8 --save {tmp_path}/teacher")
    teacher.train()
    teacher.close()
    line += f" --teacher {tmp_path}/teacher --distill-label-weight 0.2 --distill-chunk 50"
    serial = curve(0, 1, "distill", f"{line} --micro-batch-size 8")
    assert serial[0]["divergence"] > 0.1
    for found in ranks(world).run(curve, "distill", f"{line} {layout}"):
        near(found, serial)


def test_a_teacher_of_another_vocabulary_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    words = f"{MODEL} --global-batch-size 2 --train-iters 1 --mock-data --vocab-size 99 --save {tmp_path}/other"
    words = words.replace("--tokenizer-type ByteLevelTokenizer", "")
    other = build_trainer(parse_args(shlex.split(words)), quiet=True)
    other.train()
    other.close()
    with pytest.raises(ConfigError, match="the teacher has 99 words, the student 258"):
        trainer_of("distill", f"--global-batch-size 2 {files['sft']} --teacher {tmp_path}/other")
    with pytest.raises(ConfigError, match="without a teacher"):
        trainer_of("distill", f"--global-batch-size 2 {files['sft']}")
