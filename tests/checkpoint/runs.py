"""Small saves and loads on ranks, without a model: two tensors, cut over the ranks, whose numbers say the step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from course.lab08.killer import operations

from minimegatron.checkpoint.commit import (
    Keep,
    RootLock,
    complete,
    folder_of,
    published,
    read_manifest,
    verify,
    verify_names,
)
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.regions import Logical, Region
from minimegatron.checkpoint.save import AsyncSave, save
from minimegatron.comm.axis import ALONE, Axis
from tests.checkpoint.canary import canary

SHAPES = {"weight": (6, 5), "bias": (8,)}


def tensors_of(step: int, rank: int, world: int) -> dict[str, Logical]:
    """What a rank holds at a step; of an earlier one with zeros where `step` is 0."""
    found = {}
    for name, shape in SHAPES.items():
        rows = (rank * shape[0] // world, (rank + 1) * shape[0] // world)
        box = (rows, *((0, n) for n in shape[1:]))
        numbers = canary(f"{name} {step}", shape, box, torch.float32)
        found[name] = Logical(shape, [Region(box, numbers)], torch.float32)
    return found


def save_steps(rank: int, world: int, root: str, steps: list[int], background: bool, fault: Any = None) -> int:
    """Save those steps, the last one with a fault; returns how many operations the victim made in it."""
    axis = Axis.world("world")
    lock = RootLock(Path(root), "run") if rank == 0 else None
    made = 0
    for step in steps:
        mine = fault if step == steps[-1] and fault and fault[0] == rank else None
        with operations(mine[1], mine[2]) if mine else contextlib.nullcontext([0]) as count:
            tensors = tensors_of(step, rank, world)
            flight = AsyncSave(
                lambda tensors=tensors, step=step: save(Path(root), step, "run", tensors, {}, axis, Keep(newest=2)),
                background,
                step,
            )
            flight.join(20)
        made = count[0]
        flight.result()
        if rank == 0:
            with open(f"{root}.acknowledged", "a") as file:
                file.write(f"{step}\n")
    if lock is not None:
        lock.close()
    return made


def loaded(root: Path, step: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, verified."""
    manifest = read_manifest(root, step)
    verify(folder_of(root, step), manifest)
    verify_names(folder_of(root, step), manifest)
    table = tensors_of(0, 0, 1)
    read_tensors(table, folder_of(root, step), manifest, ALONE)
    return {name: tensor.parts[0].data for name, tensor in table.items()}


def exact(root: Path) -> list[int]:
    """The steps that are there; each is read and is, to the bit, what was saved at that step."""
    steps = published(root)
    for step in steps:
        for name, tensor in loaded(root, step).items():
            whole = tensors_of(step, 0, 1)[name].parts[0].data
            assert torch.equal(tensor, whole), f"step {step}: {name}"
    return steps


def complete_steps(root: Path) -> list[int]:
    """Steps of the checkpoints whose manifest is whole."""
    return list(complete(root))
