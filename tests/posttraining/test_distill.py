"""Divergences are torch's, over a cut vocabulary and in chunks, with one tensor of logits; whoever drew the answers,
layouts agree and runs resume."""

from __future__ import annotations

import shlex
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError, DataError
from minimegatron.posttraining.conversations import Tokens
from minimegatron.posttraining.distill import divergence
from minimegatron.posttraining.on_policy import DrawsAnswers, OwnAnswers
from minimegatron.posttraining.rows import Items, RowDataset
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.posttraining.test_tasks import MODEL, check_resumed, curve, near, trainer_of
from tests.thorough import mostly_thorough

V, PADDED, N = 11, 16, 7


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student's and teacher's logits, labels, and the weight of each token."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, N, PADDED, generator=generator, dtype=dtype)
    labels = torch.randint(0, V, (N,), generator=generator)
    return student, teacher, labels, torch.rand(N, generator=generator, dtype=dtype)


def plain(student: torch.Tensor, beta: float, temperature: float, a: float) -> torch.Tensor:
    """The loss of every token by torch's functions, on the words alone."""
    _, teacher, labels, _ = tensors(student.dtype)
    log_q, log_p = (F.log_softmax(z[:, :V].double() / temperature, -1) for z in (student, teacher))
    kl = lambda x, y: F.kl_div(y, x, reduction="none", log_target=True).sum(-1)  # noqa: E731
    if beta in (0.0, 1.0):
        found = kl(log_p, log_q) if beta == 0.0 else kl(log_q, log_p)
    else:
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        found = beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    return (1 - a) * found + a * F.cross_entropy(student[:, :V].double(), labels, reduction="none")


def on_ranks(rank: int, world: int, beta: float, temperature: float, a: float, chunk: int) -> tuple[Any, Any, bool]:
    """Losses and the labels' log-probabilities, this rank's gradient, and whether it lies where the logits were."""
    tp = Mesh.build(ParallelConfig(tensor_model_parallel_size=world)).tp
    student, teacher, labels, weights = tensors(torch.float64)
    width = PADDED // world
    mine = slice(rank * width, (rank + 1) * width)
    logits = student[:, mine].clone().requires_grad_()
    inner = logits * 1.0  # what an output layer gives: no leaf
    options: dict[str, Any] = {"vocab_size": V, "beta": beta, "temperature": temperature, "label_weight": a}
    loss, _, _, log_probs = divergence(inner, labels, lambda i, j: teacher[i:j, mine], tp, chunk=chunk, **options)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), inner)
    return torch.stack([loss.detach(), log_probs]), gradient.clone(), gradient.data_ptr() == inner.data_ptr()


@pytest.mark.parametrize("a", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_and_gradient_are_torchs(ranks: Any, beta: float, temperature: float, a: float) -> None:
    student, _, labels, weights = tensors(torch.float64)
    student = student.requires_grad_()
    want = plain(student, beta, temperature, a)
    (gradient,) = torch.autograd.grad((want * weights).sum(), student)
    log_probs = F.log_softmax(student[:, :V] / temperature, -1)[torch.arange(N), labels]
    found = [on_ranks(0, 1, beta, temperature, a, 3)]
    both = ranks(2).run(on_ranks, beta, temperature, a, 3)
    found.append((both[0][0], torch.cat([one[1] for one in both], 1), all(one[2] for one in both)))
    for numbers, of_logits, in_place in found:
        assert torch.allclose(numbers, torch.stack([want, log_probs]).detach(), rtol=0, atol=1e-12)
        assert torch.allclose(of_logits, gradient, rtol=0, atol=1e-12) and in_place
        assert not of_logits[:, V:].any()


class Largest(TorchDispatchMode):
    """The sizes of the tensors that are made inside, and what is alive of them at most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in known and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                self.sizes.append(storage.nbytes())
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_no_second_tensor_of_logits(beta: float) -> None:
    """Of a whole divergence and its gradient: what is made is a chunk of rows at a time."""
    n, width, chunk = 256, 64, 8
    logits = torch.randn(n, width).requires_grad_()
    inner, teacher = logits * 1.0, torch.randn(n, width)
    with Largest() as made:
        loss, *_ = divergence(
            inner, torch.zeros(n, dtype=torch.int64), lambda i, j: teacher[i:j] * 1.0, ALONE, vocab_size=width - 3,
            beta=beta, chunk=chunk,
        )  # fmt: skip
        torch.autograd.grad(loss.sum(), inner)
    assert max(made.sizes) < n * width  # a quarter of the logits: nothing with a column for each word
    assert made.peak < 16 * chunk * width * 4 + 8 * n * 4


def test_a_step_has_one_tensor_of_logits(files: dict[str, str], teacher: str) -> None:
    """Of a whole step, with the teacher's passes, the engine's and the update: the student's logits."""
    line = f"--global-batch-size 8 --train-iters 1 --split 100 {files['sft']} --micro-batch-size 8 --beta 0.5"
    trainer = trainer_of("distill", f"{line} --teacher {teacher} --distill-chunk 16 --lmbda 0.5 --seq-length 64")
    with Largest() as made:
        trainer.train()
    trainer.close()
    logits = 8 * 64 * trainer.run.model.padded_vocab_size(1) * 4
    assert [size for size in made.sizes if size > logits // 2] == [logits]


TEACHER = "--num-layers 4 --hidden-size 48 --ffn-hidden-size 64"
LAYOUTS = [
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"),
    (2, "--pipeline-model-parallel-size 2 --micro-batch-size 2 --rl-inference-tensor-model-parallel-size 2"),
    (2, "--context-parallel-size 2 --micro-batch-size 4 --rl-inference-pipeline-model-parallel-size 2"),
    (2, "--micro-batch-size 4"),
    (2, "--micro-batch-size 2 --data-parallel-sharding-strategy optim_grads_params"),
    (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2"),
]


FORMS = {
    "given answers": "--distill-label-weight 0.2",
    "own answers": "--lmbda 1 --beta 0.5 --distill-temperature 1.5",
    "both": "--lmbda 0.5 --beta 1",
}


@pytest.fixture(scope="session")
def teacher(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four layers that has seen the conversations."""
    folder = tmp_path_factory.mktemp("teacher")
    line = f"--global-batch-size 8 --train-iters 2 --split 90,10 --eval-interval 2 --eval-iters 1 {files['sft']}"
    trainer = trainer_of("sft", f"{line} {TEACHER} --micro-batch-size 8 --save {folder}")
    trainer.train()
    trainer.close()
    return str(folder)


def is_ordinary(case: Any) -> bool:
    form, _, layout = case
    return layout in {"given answers": LAYOUTS[0][1], "own answers": LAYOUTS[1][1], "both": LAYOUTS[2][1]}[form]


CASES = [(form, *layout) for form in FORMS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("form", "world", "layout"), mostly_thorough(CASES, is_ordinary, lambda case: case == CASES[0])
)
def test_every_layout_is_the_serial_one(
    ranks: Any, files: dict[str, str], teacher: str, form: str, world: int, layout: str
) -> None:
    line = f"--global-batch-size 8 --train-iters 3 --split 90,10 --eval-interval 2 --eval-iters 1 {files['sft']}"
    line += f" --teacher {teacher} --distill-chunk 50 {FORMS[form]}"
    serial = curve(0, 1, "distill", f"{line} --micro-batch-size 8")
    assert serial[0]["divergence"] > (0.1 if form == "given answers" else 0.01)
    for found in ranks(world).run(curve, "distill", f"{line} {layout}"):
        near(found, serial)
        assert all(step.get("engine gap", 0.0) < 1e-5 for step in found)


def test_of_the_samples_a_share_is_the_students(files: dict[str, str], teacher: str) -> None:
    """Which they are is a function of their number; prompts are those of the file, and only what is drawn counts."""
    line = f"--global-batch-size 8 --train-iters 2 --split 100 {files['sft']} --micro-batch-size 8 --teacher {teacher}"
    trainer = trainer_of("distill", f"{line} --lmbda 0.25 --max-completion-length 5")
    given, own = trainer.task.given.train, trainer.train_set  # type: ignore[attr-defined]
    for observer in trainer.observers:
        observer.before_step(0)
    assert [k for k in range(16) if own.is_own(k)] == [3, 7, 11, 15]
    batch, of_file = own.batch(range(8)), given.batch(range(8))
    for k in range(8):
        prompt = int(of_file["loss_mask"][k].argmax())  # inputs before the first label that counts
        assert torch.equal(batch["tokens"][k, : prompt + 1], of_file["tokens"][k, : prompt + 1])
        if k % 4 != 3:
            assert all(torch.equal(batch[name][k], of_file[name][k]) for name in of_file)
            assert not batch["drawn"][k].any() and not batch["engine_log_probs"][k].any()
            continue
        counted = batch["loss_mask"][k].nonzero().flatten()
        assert torch.equal(batch["drawn"][k], batch["loss_mask"][k]) and 1 <= len(counted) <= 5
        assert torch.equal(counted, torch.arange(prompt, prompt + len(counted)))
        assert (batch["engine_log_probs"][k, counted] < 0).all()
    with pytest.raises(DataError, match="sample 11 is the student's, and it has not answered it"):
        own.batch([11])
    trainer.close()


def test_the_last_answer_of_a_conversation_is_the_students(files: dict[str, str]) -> None:
    turns = Tokens((5, 6, 7, 8, 9, 10, 11), (False, True, True, False, False, True, True))
    alone = Tokens((5, 6, 7), (True, True, True))
    own = OwnAnswers(RowDataset(Items.of([[turns], [alone]], 8), 8), 1.0)
    prompts = {own.prompt(k) for k in range(2)}
    assert prompts == {(5, 6, 7, 8, 9), (5,)}


@pytest.mark.parametrize("form", mostly_thorough(FORMS, ("own answers",).__contains__))
def test_a_resumed_run_goes_on_to_the_bit(files: dict[str, str], teacher: str, tmp_path: Path, form: str) -> None:
    """Nothing of the student's answers is in a checkpoint: its weights draw them again."""
    line = f"--global-batch-size 8 --train-iters 3 --lr-decay-iters 3 --split 100 {files['sft']} --micro-batch-size 4"
    check_resumed("distill", f"{line} --teacher {teacher} {FORMS[form]}", tmp_path)


def test_weights_that_are_not_handed_over_show_in_the_gap(files: dict[str, str], teacher: str) -> None:
    line = f"--global-batch-size 8 --train-iters 3 --split 100 {files['sft']} --micro-batch-size 8 --lr 3e-2"
    gaps = []
    for hands_over in (True, False):
        trainer = trainer_of("distill", f"{line} --teacher {teacher} --lmbda 1")
        draws = next(each for each in trainer.observers if isinstance(each, DrawsAnswers))
        if not hands_over:
            draws.sampler.take_weights()
            draws.sampler.take_weights = lambda: None  # type: ignore[method-assign]
        trainer.train()
        trainer.close()
        gaps.append(max(report.losses["engine gap"] for report in trainer.history))
    assert gaps[0] < 1e-5 and gaps[1] > 1e-2


def test_what_does_not_fit_together_is_refused(files: dict[str, str], teacher: str) -> None:
    line = f"--global-batch-size 8 {files['sft']} --teacher {teacher}"
    for words, message in (
        ("--lmbda 1 --sequence-packing", "sequence_packing with lmbda 1.0"),
        ("--lmbda 1 --distill-label-weight 0.1", "the labels of an answer that the student drew are its own"),
        ("--lmbda 1 --max-completion-length 99", "max_completion_length 99 is above seq_length 32"),
        ("--lmbda 2", "lmbda is 2.0"),
        ("--beta 1.5", "beta is 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_of("distill", f"{line} {words}")
    run = parse_args(shlex.split(f"{MODEL} {line} --max-completion-length 5"), task="distill")
    assert run.notes[-1] == "--max-completion-length changes nothing in this run: it counts only with lmbda"


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
