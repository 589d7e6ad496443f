"""Twenty faults of a training, one a function, and the program that runs a command with one of them planted.

    twenty.py FAULT WORDS...      every rank runs `minimegatron WORDS...`, and the fault happens

What a user then sees is in docs/debugging.md, which `test_twenty` holds against a run of each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

MATRIX = "decoder.layers.1.mlp.linear_fc1.weight"
Undo = contextlib.AbstractContextManager[Any]


def replaced(module: str, name: str, change: Callable[[Any], Any]) -> Undo:
    """`MODULE.NAME`, or `MODULE.CLASS.NAME`, in the form that `change` makes of it."""
    owner: Any = importlib.import_module(f"minimegatron.{module}")
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return mock.patch.object(owner, name, change(getattr(owner, name)))


def at_steps(happen: Callable[[Any], None]) -> Undo:
    """`happen(trainer)` before every step."""

    def change(real: Any) -> Any:
        def step(trainer: Any, asks_to_stop: bool) -> Any:
            happen(trainer)
            return real(trainer, asks_to_stop)

        return step

    return replaced("training.trainer", "Trainer._step", change)


def before(happen: Callable[[], None]) -> Callable[[Any], Any]:
    """A change: something happens before each call."""

    def change(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            happen()
            return real(*args, **options)

        return call

    return change


def keeping(part: str) -> Callable[[Any], Any]:
    """A change of a function that sums the gradients of `params`: those with this in their name stay as they are."""

    def change(real: Any) -> Any:
        def sums(owner: Any, *args: Any) -> None:
            kept = {p: p.main_grad.clone() for name, p in owner.params.items() if part in name}
            real(owner, *args)
            for param, grad in kept.items():
                param.main_grad.copy_(grad)

        return sums

    return change


# ------------------------------------------------------------------------------------- sums, seeds, positions


def sum_left_out(rank: int) -> Undo:
    """The gradient of one matrix is left out of the sum over dp."""
    return replaced("parallel.data.grad_buffer", "GradBuffer.finish", keeping(MATRIX))


def another_seed(rank: int) -> Undo:
    """Rank 1 draws its initial weights from the next seed."""

    def change(real: Any) -> Any:
        return lambda name, layout, seed: real(name, layout, seed + rank)

    return replaced("layers.logical", "draw_part", change)


def norm_left_out(rank: int) -> Undo:
    """With sequence parallelism a norm's gradient is of a rank's own tokens: it is not summed."""
    return replaced("parallel.data.finalize", "sum_partial_gradients", keeping("layers.1.pre_mlp_layernorm"))


def tied_left_out(rank: int) -> Undo:
    """The first and the last stage share a matrix, and each keeps its own part of the gradient."""
    return replaced("parallel.data.finalize", "sum_tied_gradients", lambda real: lambda *args: None)


def doubled(rank: int) -> Undo:
    """On rank 1 the gradient of one matrix is twice too large."""

    def change(real: Any) -> Any:
        def sums(model: Any, mesh: Any) -> None:
            real(model, mesh)
            if rank == 1:
                model.params[MATRIX].main_grad.mul_(2)

        return sums

    return replaced("parallel.data.finalize", "sum_partial_gradients", change)


def shifted(rank: int) -> Undo:
    """Rank 1 rotates queries and keys as if its part of the sequence began a token later."""
    return replaced(
        "layers.rope",
        "RotaryEmbedding.forward",
        lambda real: lambda self, position_ids: real(self, position_ids + rank),
    )


# ----------------------------------------------------------------------------------------------- bad steps


def _bad_output(wrong: Callable[[Any], bool], value: float) -> Undo:
    """The output of the last layer's fc2 is multiplied by `value` where `wrong(trainer)`."""
    now: list[Any] = []

    def note(trainer: Any) -> None:
        now[:] = [trainer]
        for name, module in trainer.model.named_modules():
            if name.endswith("layers.1.mlp.linear_fc2"):
                module.planted = True

    def change(real: Any) -> Any:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = real(self, x)
            return y * value if getattr(self, "planted", False) and wrong(now[0]) else y

        return forward

    stack = contextlib.ExitStack()
    stack.enter_context(at_steps(note))
    stack.enter_context(replaced("layers.linear", "RowParallelLinear.forward", change))
    return stack


def bad_machine(rank: int) -> Undo:
    """In the third step rank 1 computes NaN in its second microbatch, whatever the sample."""
    calls = [0]

    def wrong(trainer: Any) -> bool:
        calls[0] += 1
        return rank == 1 and trainer.state.iteration == 2 and calls[0] % 2 == 0

    return _bad_output(wrong, float("nan"))


def _on_sample(number: int, begins: Callable[[], None] = lambda: None, factor: float = 1.0) -> Undo:
    """`begins()` before the forward pass of this sample, whichever rank has it; its loss is multiplied by `factor`."""
    tokens: list[torch.Tensor] = []

    def change(real: Any) -> Any:
        def step(batches: Any, model: Any) -> Any:
            batch = next(batches)
            here = bool((batch["tokens"] == tokens[0]).all())
            if here:
                begins()
            output, summed = real(iter((batch,)), model)
            return (output * factor if here else output), summed

        return step

    def wrap(trainer: Any) -> None:
        if not tokens:
            tokens.append(trainer.train_set[number]["tokens"])
            trainer.forward_step = change(trainer.forward_step)

    return at_steps(wrap)


def bad_document(rank: int) -> Undo:
    """On sample 7 a layer overflows."""
    begun = list[int]()

    def wrong(trainer: Any) -> bool:
        return bool(begun and begun.pop())

    stack = contextlib.ExitStack()
    stack.enter_context(_bad_output(wrong, float("inf")))
    stack.enter_context(_on_sample(7, lambda: begun.append(7)))
    return stack


def spike(rank: int) -> Undo:
    """Sample 75 has a loss that is thirty times too large."""
    return _on_sample(75, factor=30.0)


# ------------------------------------------------------------------------------------------ ranks, time, order


def slow(rank: int) -> Undo:
    """Rank 1 takes a quarter of a second longer for every loss."""
    return replaced("training.step", "loss_func", before(lambda: time.sleep(0.25 * (rank == 1))))


def collects(rank: int) -> Undo:
    """Rank 1 holds a million lists, and looks for garbage among them in every second step."""
    held = [[number] for number in range(1_000_000)] if rank == 1 else []

    def happen(trainer: Any) -> None:
        if rank == 1 and held and trainer.state.iteration % 2:
            gc.collect()

    return at_steps(happen)


def stuck(rank: int) -> Undo:
    """The loader of rank 1 waits for a file system that does not answer, in the third step."""
    calls = [0]

    def read_from_a_dead_server() -> None:
        calls[0] += 1
        if rank == 1 and calls[0] == 5:
            threading.Event().wait(600)

    return replaced("data.gpt_dataset", "MockGPTDataset.batch", before(read_from_a_dead_server))


def out_of_order(rank: int) -> Undo:
    """In the third step ranks count something with two collectives, and rank 1 calls them the other way round."""
    from minimegatron.comm.collectives import all_gather, all_reduce

    def count_tokens(trainer: Any) -> None:
        if trainer.state.iteration != 2:
            return
        calls = [lambda: all_gather(torch.ones(4), trainer.mesh.dp), lambda: all_reduce(torch.ones(4), trainer.mesh.dp)]
        for call in calls[::-1] if rank == 1 else calls:
            call()

    return at_steps(count_tokens)


def dies(rank: int) -> Undo:
    """The operating system kills rank 1 in the third step, as it does when memory is short."""

    def happen(trainer: Any) -> None:
        if rank == 1 and trainer.state.iteration == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_steps(happen)


# -------------------------------------------------------------------------------------------- copies that drift


def spoiled_moment(rank: int) -> Undo:
    """In the third step a moment of one matrix has lost its sign on rank 2."""

    def happen(trainer: Any) -> None:
        if rank == 2 and trainer.state.iteration == 2:
            (one,) = (p for p in trainer.optimizer.params if p.name == MATRIX)
            trainer.optimizer._update.tensors(one)["exp_avg"].neg_()

    return at_steps(happen)


def other_rate(rank: int) -> Undo:
    """From the third step on the schedule of rank 2 is 1 % too high."""
    return replaced(
        "optim.schedule", "Schedule.lr_at",
        lambda real: lambda self, step, *peak: real(self, step, *peak) * (1.01 if rank == 2 and step > 8 else 1.0),
    )  # fmt: skip


def stale(rank: int) -> Undo:
    """Of one matrix rank 2 keeps the weights of the step before, in place of those that it was sent."""

    def change(real: Any) -> Any:
        def step(trainer: Any, asks_to_stop: bool) -> Any:
            kept = trainer.model.params[MATRIX].detach().clone()
            done = real(trainer, asks_to_stop)
            with trainer.model.whole_weights():
                if rank == 2:
                    trainer.model.params[MATRIX].data.copy_(kept)
            return done

        return step

    return replaced("training.trainer", "Trainer._step", change)


def own_loads(rank: int) -> Undo:
    """The bias that balances the experts follows the tokens of the rank alone."""
    return replaced("layers.moe.balance", "all_reduce", lambda real: lambda table, axis: table)


def another_order(rank: int) -> Undo:
    """When the run goes on, the samples of rank 1 are shuffled otherwise: its index is an old one."""
    moved = 7 if rank == 1 and "--load" in sys.argv else 0
    return replaced(
        "data.indices", "Epochs.__init__",
        lambda real: lambda self, lengths, documents, s, seed, *rest: real(
            self, lengths, documents, s, seed + moved, *rest),
    )  # fmt: skip


def nothing(rank: int) -> Undo:
    """The fault is none of a rank's: see `test_twenty`."""
    return contextlib.nullcontext()


FAULTS: dict[str, Callable[[int], Undo]] = {
    "A sum that is left out": sum_left_out,
    "Another seed on a rank": another_seed,
    "NaN in one microbatch": bad_machine,
    "A slow rank": slow,
    "A loader that is stuck": stuck,
    "A bad document": bad_document,
    "A spike": spike,
    "Two collectives in another order": out_of_order,
    "A rank that dies": dies,
    "A spoiled optimizer state": spoiled_moment,
    "A gradient with a wrong scale": doubled,
    "A norm that sequence parallelism does not sum": norm_left_out,
    "A tied matrix that is not summed": tied_left_out,
    "A wrong position with context parallelism": shifted,
    "A router that is not synchronised": own_loads,
    "Another learning rate on a rank": other_rate,
    "A stale weight after a gather": stale,
    "A flipped bit in a checkpoint": nothing,
    "Another order of the data after a resume": another_order,
    "A rank that collects garbage": collects,
}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))  # an installed package does not bring its tests
    from minimegatron import cli
    from tests.mock_data import few_documents

    with few_documents(), FAULTS[sys.argv[1]](int(os.environ.get("RANK", "0"))):
        sys.exit(cli.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
