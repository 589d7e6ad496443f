"""A training run on ranks that were not given the same ends before it begins, and says what differs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from labkit.ranks.torchrun import launch
from minimegatron.config.run import KINDS
from minimegatron.errors import ConfigError
from minimegatron.launch.agreement import differences
from minimegatron.training import datasets, same_run
from minimegatron.training.arguments import parse_args

TINY = "--mock-data --seq-length 16 --hidden-size 32 --num-attention-heads 2 --vocab-size 64 --train-iters 2"


def facts_of(line: str = "") -> dict[str, Any]:
    return same_run.run_facts(parse_args(shlex.split(f"{TINY} {line}")))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--seed 7", "seed is 1234 on rank 0 and 7 on rank 1"),
        ("--lr 0.002", "lr is 0.001 on rank 0 and 0.002 on rank 1"),
        ("--clip-grad 2.0", "clip_grad is 1.0 on rank 0 and 2.0 on rank 1"),
        ("--hidden-dropout 0.2", "hidden_dropout is 0.1 on rank 0 and 0.2 on rank 1"),
        ("--global-batch-size 2", "global_batch_size is None on rank 0 and 2 on rank 1"),
        ("--num-layers 3", "num_layers is 2 on rank 0 and 3 on rank 1"),
        ("--bf16", "params_dtype is fp32 on rank 0 and bf16 on rank 1"),
    ],
)
def test_one_flag_is_named(line: str, said: str) -> None:
    assert said in differences([facts_of(), facts_of(line)])


def test_every_field_is_compared_or_its_freedom_has_a_reason() -> None:
    assert set(facts_of()) & set(KINDS) == set(KINDS) - set(same_run.RANK_LOCAL)
    assert "log_file" in same_run.RANK_LOCAL and "seed" not in same_run.RANK_LOCAL
    assert not differences([facts_of(), facts_of("--log-file a.jsonl --profile-dir b --data-cache-path c")])


def test_versions_and_an_edited_source_file_are_named(tmp_path: Path) -> None:
    here = facts_of()
    with mock.patch.object(torch, "__version__", "2.11.0"), mock.patch.object(numpy, "__version__", "1.0"):
        said = " ".join(differences([here, facts_of()]))
    assert "version of torch is " in said and "2.11.0 on rank 1" in said and "version of numpy is" in said
    real = Path.read_bytes
    with mock.patch.object(Path, "read_bytes", lambda p: real(p) + b"#" * (p.name == "clip.py")):
        assert [text.partition(" is ")[0] for text in differences([here, facts_of()])] == ["minimegatron/optim/clip.py"]


def test_the_file_of_a_spec_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "a_spec_of_ours.py").write_text(text)
        seen.append(facts_of("--spec a_spec_of_ours f"))
    assert [text.partition(" is ")[0] for text in differences(seen)] == ["source of the spec"]


@pytest.mark.parametrize("size", [0, 10, datasets.BLOCK_BYTES, 5 * datasets.BLOCK_BYTES + 3])
def test_a_data_file_is_told_by_its_size_and_its_ends(tmp_path: Path, size: int) -> None:
    path = tmp_path / "data.bin"
    seen = set()
    for change in (None, 0, size // 2, size - 1):
        raw = bytearray(size)
        if size and change is not None:
            raw[change] = 1
        path.write_bytes(raw)
        seen.add(datasets.file_fact(str(path)))
    path.write_bytes(bytes(size + 1))
    seen.add(datasets.file_fact(str(path)))
    assert len(seen) == (5 if size else 2)


def load_other_data(rank: int, world: int, folder: str) -> str:
    """Rank 1's node has another copy of the data under the same name."""
    from minimegatron.comm.mesh import Mesh
    from minimegatron.training.datasets import load_data

    os.chdir(os.path.join(folder, str(rank)))
    line = "--data-path words --tokenizer-type NullTokenizer --vocab-size 300 --seq-length 4 --hidden-size 32"
    run = parse_args(shlex.split(f"{line} --num-attention-heads 2"), world)
    with pytest.raises(ConfigError) as caught:
        load_data(run, Mesh.build(run.parallel), (2, 0, 0))
    return caught.value.what


def test_another_copy_of_the_data_is_named(ranks: Any, tmp_path: Path) -> None:
    from minimegatron.data.indexed import IndexedDatasetBuilder

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        with IndexedDatasetBuilder(tmp_path / str(rank) / "words.bin", numpy.uint16) as builder:
            for document in range(20):
                builder.add_document([document + rank, 1, 2, 3, 4], [5])
            builder.finalize(tmp_path / str(rank) / "words.idx")
    for said in ranks(2).run(load_other_data, str(tmp_path), timeout=30):
        assert said.startswith("the ranks were not given the same: data file 0 (words.bin) is 200 bytes ("), said
        assert said.count("data file") == 1


@pytest.mark.thorough
def test_the_command_ends_with_2_and_one_message(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, shlex\n"
        "from minimegatron.commands.pretrain_gpt import main\n"
        f"main(shlex.split({TINY!r}) + ['--hidden-size', '64'][: 2 * (os.environ['RANK'] == '1')])\n"
    )
    run = launch(script, 2, tmp_path / "run", timeout=60)
    assert run.returncode == 2, run.explain()
    said = "ConfigError: the ranks were not given the same: "
    assert said in run.explain() and "hidden_size is 32 on rank 0 and 64 on rank 1" in run.explain()
    assert "".join(run.stderr).count("the ranks were not given the same") == 1
