"""What ranks do with a hand-in: import it from its folder, run it, and return plain data, on which `criteria` decides.

Each job imports `architecture` anew from the first folder of `sys.path`: the hand-in's, or that of a variant of it.
Everything is computed in fp64, but for training and the memory of a run.

| trial         | what comes back                                                                          |
|---------------|------------------------------------------------------------------------------------------|
| `built`       | names of the hand-in's own modules                                                       |
| `passed`      | inputs, outputs and weights of these modules in one forward pass                         |
| `referred`    | what the hand-in's reference makes of them                                               |
| `slopes`      | of each parameter the derivative in a direction: by autograd, and by two forward passes  |
| `disturbed`   | how far logits move when one token is another                                            |
| `compared`    | the first tensor in which a layout differs from one process (`training/comparison`)      |
| `recomputed`  | distances of gradients with recompute from those without                                 |
| `trained`     | losses and norms of steps, and memory that was predicted and counted                     |
| `generated`   | how far logits from kept states are from those of the whole sequence, and greedy words   |
| `learned`     | losses of a short training on a task that needs earlier tokens                           |
| `fingerprint` | numbers that move when the hand-in computes something else                               |
| `tested`      | how the hand-in's own tests end                                                          |
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.ranks.pool import this_process
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of, logical_name, logical_parameters
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.decoder import GPTModel
from minimegatron.models.spec import spec_from_name
from minimegatron.training.build import build_trainer
from minimegatron.training.comparison.distance import distance_of
from minimegatron.training.comparison.twin import compare_with_twin
from minimegatron.training.comparison.verdict import verdict
from minimegatron.training.datasets import RunData
from minimegatron.training.memory_report import MemoryReport
from minimegatron.training.observers.checks import gradients
from minimegatron.training.step import forward_step
from minimegatron.training.task import Task

from .given.trying import PIECES, data_of, from_states, model_of, run_of

MODULE = "architecture"
STEP = 1e-5  # of a difference quotient, in a direction of length 1
WORDS = 9  # of a greedy answer
TOPICS, PER_TOPIC = 4, 8  # of the task that is learned


def built(rank: int, world: int, flags: str) -> list[str]:
    """Build the model on one rank."""
    return [name for name, _ in own_modules(model_of(flags))]


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(logical name, module): the outermost modules in layers whose class `architecture` defines, with a forward."""
    inside: list[str] = []
    for name, module in model.named_modules():
        kind = type(module)
        if any(name.startswith(f"{outer}.") for outer in inside) or getattr(kind, "is_stage", False):
            continue
        if kind.__module__ == MODULE and "forward" in vars(kind):
            inside.append(name)
            yield logical_name(name), module


class Passed(NamedTuple):
    """A module of the hand-in in a forward pass.

    Attributes:
        name, layer: its logical name, and the number of its layer.
        weights: its parameters by their names in it.
        x, y: [s, b, h].
    """

    name: str
    layer: int
    weights: dict[str, Tensor]
    x: Tensor
    y: Tensor


@torch.no_grad()
def passed(rank: int, world: int, flags: str) -> tuple[Any, list[Passed]]:
    """(Configuration of the model, its own modules), of two random sequences."""
    run, model, found = run_of(flags), model_of(flags), list[Passed]()

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weights = {n: p.detach().clone() for n, p in module.named_parameters()}
            layer = int(next(word for word in name.split(".") if word.isdigit()))
            found.append(Passed(name, layer, weights, args[0].clone(), output.clone()))

        return hook

    for name, module in own_modules(model):
        module.register_forward_hook(after(name))
    model.full_logits(data_of(run).batch([0, 1])["tokens"])
    return run.model, found


def referred(rank: int, world: int, file: Path, config: Any, given: list[Passed]) -> list[Tensor]:
    """What the reference makes of each module's input, [s, b, h], a sequence at a time; `architecture` is not there."""
    spec = importlib.util.spec_from_file_location("reference", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [
        torch.stack([module.reference(config, one.layer, one.weights, x.clone()) for x in one.x.unbind(1)], 1)
        for one in given
    ]


def slopes(rank: int, world: int, flags: str) -> dict[str, tuple[float, float]]:
    """Logical name of a parameter -> (by autograd, by two forward passes)."""
    run, model = run_of(flags), model_of(flags)
    batch = data_of(run).batch([0, 1])

    def loss() -> Tensor:
        return (model(batch["tokens"], None, batch["labels"]) * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

    loss().backward()
    generator, found = torch.Generator().manual_seed(run.training.seed), {}
    for name, param in logical_parameters(model):
        direction = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        direction /= direction.norm()
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        with torch.no_grad():
            param.add_(direction, alpha=STEP)
            up = loss().item()
            param.add_(direction, alpha=-2 * STEP)
            down = loss().item()
            param.add_(direction, alpha=STEP)
        found[name] = (grad * direction).sum().item(), (up - down) / (2 * STEP)
    return found


class Moved(NamedTuple):
    """How far logits move when a token is another one, in units of the largest logit.

    Attributes:
        earlier, later: those of tokens before it, of tokens behind it.
        beside: those of the other sequence.
    """

    earlier: float
    later: float
    beside: float


@torch.no_grad()
def disturbed(rank: int, world: int, flags: str, places: list[int], documents: bool) -> list[Moved]:
    """Of two sequences the first is changed at each place.

    Args:
        documents: the place ends a document; `later` are tokens of the next one.
    """
    run, model, found = run_of(flags), model_of(flags), list[Moved]()
    tokens = data_of(run).batch([0, 1])["tokens"]
    for place in places:
        ids = (torch.arange(tokens.shape[1]) > place).long().expand_as(tokens) if documents else None
        other = tokens.clone()
        other[0, place] = (other[0, place] + 1) % run.model.vocab_size
        before, after = (model.full_logits(each, document_ids=ids) for each in (tokens, other))
        moved = (after - before).abs().amax(-1) / before.abs().max()
        found.append(Moved(_most(moved[0, :place]), _most(moved[0, place + 1 :]), _most(moved[1])))
    return found


def _most(values: Tensor) -> float:
    """The largest; a NaN counts as infinite."""
    return values.nan_to_num(nan=math.inf).max().item() if values.numel() else 0.0


# ------------------------------------------------------------------------------------------------------- layouts


def compared(rank: int, world: int, flags: str) -> tuple[str, str, str]:
    """(What, where, fix) of the first tensor in which the layout differs; what alone if there is none."""
    run = run_of(flags, world)
    assert run.training.global_batch_size is not None
    mesh = Mesh.build(run.parallel)
    return verdict(compare_with_twin(run, mesh, data_of(run), run.training.global_batch_size, forward_step))


def recomputed(rank: int, world: int, flags: str, more: str) -> dict[str, float]:
    """Logical name -> distance of its gradient with the flags `more` from that without."""
    with_flags, without = (
        gradients(run, Mesh.serial(), data_of(run), run.training.global_batch_size or 1, forward_step)
        for run in (run_of(f"{flags} {more}"), run_of(flags))
    )
    wanted, got = without.model.whole_gradients(), with_flags.model.whole_gradients()
    floor = 1e-6 * max(grad.abs().max().item() for grad in wanted.values())
    return {name: distance_of(got[name], wanted[name], floor) for name in wanted} | {
        name: abs(with_flags.losses[name] - loss) / abs(loss) for name, loss in without.losses.items()
    }


class OnDrawnTokens(Task):
    """Pre-training on random tokens."""

    def load_data(self, run: RunConfig, mesh: Mesh, num_samples: Any, joint: Any, quiet: bool) -> RunData:
        return RunData(NullTokenizer(run.model.vocab_size - 1), run.model.vocab_size, data_of(run), None, None)


class Trained(NamedTuple):
    """A run.

    Attributes:
        steps: (loss, norm of the gradient) of each.
        memory: (rank, what a prediction leaves out, bytes predicted, bytes counted), each at its peak, and of these
            the bytes between steps, of each rank; empty unless memory was watched.
    """

    steps: list[tuple[float, float]]
    memory: list[tuple[str, str, int, int, int, int]]


def trained(rank: int, world: int, flags: str, save: bool = False) -> Trained:
    """Train; with `save` write a checkpoint before the first step, too, of what was loaded."""
    trainer = build_trainer(run_of(flags, world), task=OnDrawnTokens, quiet=True)
    try:
        rows: list[Any] = []
        for observer in trainer.observers:
            if isinstance(observer, MemoryReport):
                observer.write = lambda record: rows.extend(record["rows"])
        if save:
            trainer.checkpoints.save()
        trainer.train()
    finally:
        trainer.close()
    memory = []
    for (who, told, between, lacks), (_, counted, held, _) in zip(rows[::2], rows[1::2], strict=True):
        left_out = lacks if "not predicted" in lacks else ""
        memory.append((who, left_out, sum(told.values()), sum(counted.values()), between, held))
    return Trained([(one.losses["lm loss"], one.grad_norm or 0.0) for one in trainer.history], memory)


# ----------------------------------------------------------------------------------------------------- generation


class Generated(NamedTuple):
    """Generation beside the whole sequence.

    Attributes:
        off: largest distance of logits from kept states, in units of the largest logit.
        after_others: the same where an earlier sequence has left NaN in the memory.
        words, wanted: greedy answers of an engine with fewer places than prompts, and those of whole passes.
    """

    off: float
    after_others: float
    words: list[list[int]]
    wanted: list[list[int]]


@torch.no_grad()
def generated(rank: int, world: int, flags: str, prompts: list[list[int]]) -> Generated:
    """Over tp on several ranks."""
    run = run_of(flags, world)
    model = model_of(flags, Mesh.build(run.parallel)).eval()
    tokens = data_of(run).batch([0, 1, 2])["tokens"][:, : sum(PIECES)]
    whole = model.full_logits(tokens)
    off, after = (
        _most((from_states(model, tokens, left=left) - whole).abs()) / whole.abs().max().item()
        for left in (0.0, math.nan)
    )
    words: list[list[int]] = []
    if world == 1:  # a group of two computes the same words, as its logits say
        config = EngineConfig(64, page_size=4, max_num_seqs=2, max_num_batched_tokens=8)
        words = [one.tokens for one in generate(Engine(model, config), prompts, WORDS)]
    wanted = [greedy(model, prompt, len(words[i])) for i, prompt in enumerate(prompts[: len(words)])]
    return Generated(off, after, words, wanted)


def greedy(model: GPTModel, prompt: list[int], words: int) -> list[int]:
    """The likeliest words, by whole passes."""
    ids = list(prompt)
    for _ in range(words):
        ids.append(int(model.full_logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


# ------------------------------------------------------------------------------------------------------- learning


def learned(rank: int, world: int, flags: str, steps: int, rate: float) -> list[float]:
    """Loss of each step on sequences whose first token says by which rule each token follows the one before it.

    Each of `TOPICS` first tokens has a rule of its own: a permutation of the tokens, different from the others' at each
    token. Whoever sees the token before alone has `TOPICS` equally likely next ones, so log(TOPICS) of loss.
    """
    run = run_of(flags)
    vocabulary = TOPICS * PER_TOPIC
    assert run.model.vocab_size >= vocabulary + TOPICS
    draw = torch.Generator().manual_seed(run.training.seed)
    shown, hidden = torch.randperm(vocabulary, generator=draw), torch.randperm(vocabulary, generator=draw)
    model = build_model_chunks(run.model, Mesh.serial(), run.training.seed, spec_from_name(run.spec, run.model))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0), list[float]()
    for step in range(steps):
        topic = torch.randint(0, TOPICS, (16,), generator=draw)
        rows = [vocabulary + topic, torch.randint(0, vocabulary, (16,), generator=draw)]
        for _ in range(run.data.seq_length - 1):
            rows.append(shown[(hidden[rows[-1]] + PER_TOPIC * topic) % vocabulary])
        ids = torch.stack(rows, 1)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10)
        loss = model(ids[:, :-1], None, ids[:, 1:])[:, 1:].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# -------------------------------------------------------------------------------------------------------- mistakes


def fingerprint(rank: int, world: int, flags: str, layout: str) -> dict[str, Tensor | str]:
    """What the hand-in computes, in numbers, by the way in which it is asked; a text where that way fails.

    Args:
        flags: of one process.
        layout: flags more, of all ranks.
    """
    run = run_of(flags)
    model = model_of(flags)
    batch = data_of(run).batch([0, 1])
    found: dict[str, Tensor | str] = {}

    def note(way: str, numbers: Any) -> None:
        try:
            found[way] = numbers()
        except Exception as error:  # of whatever kind: a hand-in with a mistake in it
            found[way] = f"{type(error).__name__}: {error}"

    def backward() -> Tensor:
        (model(batch["tokens"], None, batch["labels"]) * batch["loss_mask"]).sum().backward()
        return torch.cat([p.grad.flatten() for _, p in logical_parameters(model) if p.grad is not None])

    def over_ranks() -> Tensor:
        there = run_of(f"{flags} {layout}", world)
        mesh = Mesh.build(there.parallel)
        ours = gradients(there, mesh, data_of(there), there.training.global_batch_size or 1, forward_step).model
        whole = ours.whole_gradients()
        return torch.cat([gather_logical(whole[n], layout_of(p), mesh).flatten() for n, p in ours.params.items()])

    with torch.no_grad():
        note("forward", lambda: model.full_logits(batch["tokens"]))
    note("backward", backward)
    ids = (torch.arange(run.data.seq_length) > run.data.seq_length // 2).long().expand_as(batch["tokens"])
    with torch.no_grad():
        note("documents", lambda: model.full_logits(batch["tokens"], document_ids=ids))
        note("states", lambda: from_states(model.eval(), batch["tokens"][:, : sum(PIECES)], left=math.nan))
    note("ranks", over_ranks)
    return found


def tested(rank: int, world: int, folder: Path) -> tuple[int, str]:
    """(pytest's exit status, what it printed last) of the tests in a folder."""
    import pytest

    dist.destroy_process_group()  # as if pytest had been started in a shell
    os.chdir(folder)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            options = [
                "-x",
                "-q",
                "--disable-plugin-autoload",
                "-p",
                "no:cacheprovider",
                "--tb=line",
                "-c",
                os.devnull,
                "--rootdir",
                str(folder),
            ]
            status = pytest.main([*options, str(folder)])
    finally:
        this_process().close()  # the ranks that the tests have started
    return int(status), said.getvalue()[-1000:]
