"""What a checkpoint's ranks do for each other: hash all files however few they are, settle a save after one step, and
begin random streams anew where a rank stands elsewhere."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.checkpoint import save as saves
from minimegatron.checkpoint.commit import complete
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh, check_grids_agree
from minimegatron.comm.random import stream_seeds
from minimegatron.config import ParallelConfig
from minimegatron.errors import CheckpointError, ConfigError, RankError
from minimegatron.training import checkpointing
from minimegatron.training.run_state import layout_facts, same_layout
from tests.thorough import SLOW
from tests.training.test_trainer import numbers, trainer_of

LINE = "--num-layers 1 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr-decay-iters 6"


def trained(rank: int, world: int, line: str) -> list[tuple[float, float | None]]:
    trainer = trainer_of(f"{LINE} {line}", world)
    try:
        trainer.train()
    finally:
        trainer.close()
    return numbers(trainer.history)


# ------------------------------------------------------------------------------------------------ hashes


def refusals(rank: int, world: int, root: str, files: list[str], options: str) -> list[str]:
    """What loading says with one bit flipped in each of the files, one after the other; and with none, at the end."""
    trainer = trainer_of(f"{LINE} {options}", world)
    checkpoints, said = trainer.checkpoints, []
    checkpoints.config = checkpoints.config.replace(load=root, finetune="--tensor" in options)
    for name in [*files, ""]:
        path = Path(root, "iter_0000002", name)
        good = path.read_bytes() if name else b""
        c.barrier(trainer.mesh.world)
        if name and rank == 0:
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))
        c.barrier(trainer.mesh.world)
        try:
            assert checkpoints.load()
            said.append("")
        except (CheckpointError, RankError) as error:
            said.append(f"{error.what}, {error.where}")
        c.barrier(trainer.mesh.world)
        if name and rank == 0:
            path.write_bytes(good)
    trainer.close()
    return said


@SLOW
def test_every_file_is_hashed_by_fewer_ranks_than_have_written(ranks, tmp_path):
    """Also those in which a rank, or nobody, wants anything."""
    model, pipeline = "--num-layers 2 --untie-embeddings-and-output-weights", "--pipeline-model-parallel-size 2"
    ranks(4).run(trained, f"{model} --save {tmp_path} --exit-interval 2 --use-distributed-optimizer {pipeline}")
    files = sorted(complete(tmp_path)[2].files)
    assert len(files) == 4
    for world, options in ((1, ""), (2, "--tensor-model-parallel-size 2"), (2, pipeline)):
        for said in ranks(world).run(refusals, str(tmp_path), files, f"{model} {options}"):
            assert said.pop() == "", "without a flipped bit"
            for name, text in zip(files, said, strict=True):
                assert "its hash differs" in text and name in text, f"{world} ranks {options}: {name}: {text}"


# ------------------------------------------------------------------------------------------------ in the background


def settled(rank: int, world: int, root: str) -> list[Any]:
    """Who takes the outcome of a save when: it has ended on rank 0, then on both, then has failed on rank 1."""
    trainer = trainer_of(f"{LINE} --async-save --save {root}", world)
    checkpoints, asked, found = trainer.checkpoints, [], []

    def under_way(error: Exception | None) -> tuple[threading.Event, saves.AsyncSave]:
        release = threading.Event()

        def write() -> None:
            assert rank == 0 or release.wait(30)
            if error is not None and rank == 1:
                raise error

        checkpoints._flight = flight = saves.AsyncSave(write, True, 2)
        if rank == 0:
            flight.join(30)
        return release, flight

    for error in (None, CheckpointError("the disk of rank 1 is full")):
        release, flight = under_way(error)
        with mock.patch.object(checkpointing, "on_all_ranks", lambda fn, axis: asked.append(fn)):
            checkpoints.settle(wait=False)
        found.append((len(asked), checkpoints._flight is not None))
        asked.clear()
        release.set()
        checkpoints._flight = flight
        flight.join(30)
        c.barrier(trainer.mesh.world)
        try:
            checkpoints.settle(wait=False)
            found.append(checkpoints._flight is None)
        except Exception as seen:
            found.append(str(seen).splitlines()[0])
    trainer.close()
    return found


def test_a_save_is_over_when_it_is_over_on_every_rank(ranks, tmp_path):
    """A rank that takes the outcome alone asks the others in the middle of their next step."""
    full = "the disk of rank 1 is full"
    said = ranks(2).run(settled, str(tmp_path))
    assert said[0] == [(0, True), True, (0, True), f"rank 1 failed: CheckpointError: {full}"]
    assert said[1] == [(0, True), True, (0, True), full]


def test_what_the_passes_change_is_copied_before_they_run(tmp_path, monkeypatch):
    """The copy of the rest is held back until the next passes are over: the history of FP8 is that of the save."""
    line = f"{LINE} --bf16 --fp8-format hybrid --fp8-recipe delayed"
    trainer = trainer_of(f"{line} --save {tmp_path}/a --save-interval 2 --async-save --exit-interval 3")
    passes, copy, waits = threading.Event(), trainer.checkpoints._staging.copy, trainer.checkpoints.before_update

    def late(tensors: Any) -> Any:
        assert threading.current_thread().name != "checkpoint" or passes.wait(60)
        return copy(tensors)

    def before_update() -> None:
        if trainer.state.iteration == 2:
            passes.set()
        waits()

    monkeypatch.setattr(trainer.checkpoints._staging, "copy", late)
    monkeypatch.setattr(trainer.checkpoints, "before_update", before_update)
    trainer.train()
    trainer.close()
    trained(0, 1, f"{line.removeprefix(LINE)} --save {tmp_path}/b --exit-interval 2")
    a, b = (CheckpointFiles(tmp_path / x / "iter_0000002", complete(tmp_path / x)[2]) for x in "ab")
    assert any("fp8" in name for name in a.manifest.tensors)
    for name in a.manifest.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


def test_a_run_that_is_closed_waits_for_what_it_is_writing(tmp_path, monkeypatch):
    """A thread of its own would end with the process, and nobody would hear of it."""
    trainer, closing, real = (
        trainer_of(f"{LINE} --save {tmp_path} --async-save"),
        threading.Event(),
        saves.write_shard,
    )

    def write(*args: Any) -> Any:
        assert closing.wait(60)
        return real(*args)

    monkeypatch.setattr(saves, "write_shard", write)
    join = saves.AsyncSave.join
    monkeypatch.setattr(saves.AsyncSave, "join", lambda flight, seconds: (closing.set(), join(flight, seconds)))
    trainer.checkpoints.save()
    trainer.close()
    closed = list(complete(tmp_path))
    closing.set()
    assert closed == [0]


# ------------------------------------------------------------------------------------------------ weights alone


@SLOW
def test_weights_without_an_optimizer_come_whole_to_ranks_that_share_them(ranks, tmp_path):
    """A rank reads the part that it updates; the parts of the others are those of the beginning until they come."""
    ranks(2).run(trained, f"--save {tmp_path} --exit-interval 2")
    line = f"--load {tmp_path} --finetune --exit-interval 1"
    (want, _), *_ = ranks(2).run(trained, line)[0]
    assert want != trained(0, 1, "--exit-interval 1")[0][0]
    for stage in ("optim", "optim_grads --overlap-param-gather", "optim_grads_params"):
        zero = f"--use-distributed-optimizer --data-parallel-sharding-strategy {stage}"
        for (got, _), *_ in ranks(2).run(trained, f"{line} {zero}"):
            assert got == pytest.approx(want, rel=1e-6), stage


# ------------------------------------------------------------------------------------------------ random streams


def test_layouts_with_equal_facts_have_equal_streams_on_every_rank():
    """What a checkpoint says of its layout tells whether each rank may go on with the streams of its number."""
    sizes = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
    orders = ("tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "tp-cp-pp-ep-dp", "pp-tp-cp-dp-ep")
    streams: dict[str, set[str]] = defaultdict(set)
    for order, *chosen in itertools.product(orders, *[(1, 2)] * 5):
        fields = {f"{name}_parallel_size": size for name, size in zip(sizes, chosen, strict=True)}
        try:
            parallel = ParallelConfig.from_dict({**fields, "order": order, "sequence_parallel": chosen[0] > 1})
            check_grids_agree(parallel, 4)
            meshes = [Mesh.planned(parallel, rank, 4) for rank in range(4)]
        except ConfigError:
            continue
        seeds = [
            stream_seeds(1, tp_rank=m.tp.rank, pp_rank=m.pp.rank, data_rank=m.dp_cp.rank, ep_rank=m.ep.rank,
                         etp_rank=m.etp.rank)
            for m in meshes
        ]  # fmt: skip
        streams[str(layout_facts(meshes[0]))].add(str(seeds))
    assert len(streams) > 40 and all(len(found) == 1 for found in streams.values())


def test_a_layout_that_is_not_said_is_the_default_one():
    """A checkpoint of an earlier version has neither etp nor the order."""
    ours = layout_facts(Mesh.serial())
    earlier = {name: ours[name] for name in ("tp", "cp", "pp", "dp", "ep", "world")}
    assert same_layout(earlier, Mesh.serial()) and same_layout(ours, Mesh.serial())
    assert not same_layout({}, Mesh.serial()), "as `convert` writes it"
    assert not same_layout({**earlier, "ep": 2}, Mesh.serial())
    assert not same_layout(earlier, Mesh.serial(ParallelConfig(order="dp-tp-cp-ep-pp")))


@SLOW
def test_ranks_that_stand_elsewhere_do_not_go_on_with_anothers_streams(ranks, tmp_path):
    """tp ranks drop alike from one stream; after a resume in another order they would each have another one."""
    line = "--tensor-model-parallel-size 2 --hidden-dropout 0.5 --check-replicas-interval 1"
    ranks(4).run(trained, f"{line} --save {tmp_path} --exit-interval 2")
    found = ranks(4).run(trained, f"{line} --load {tmp_path} --order dp-tp-cp-ep-pp --exit-interval 4")
    assert len(found[0]) == 2 and all(one == found[0] for one in found)
