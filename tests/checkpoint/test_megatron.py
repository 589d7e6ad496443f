"""Checkpoints of Megatron's own format: read exactly, executed never, and written so that Megatron reads them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint.conversion import logical_tensors, open_model
from minimegatron.checkpoint.megatron import args_of, as_ours, as_theirs, config_from_args, extra_states
from minimegatron.checkpoint.pickled import read_pickle
from minimegatron.checkpoint.sources import InMemory
from minimegatron.checkpoint.torch_dist import TorchDist, read_common, write_release, write_torch_dist
from minimegatron.commands.convert import main
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.models.families import family_config
from tests.golden import HERE
from tests.oracle import torch_dist
from tests.thorough import THOROUGH

FROZEN = (
    HERE / "torch_dist"
)  # `python -m tests.oracle.torch_dist write checkpoint llama 2 1`: Megatron-Core 0.16.1 on two ranks


def same(weights: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert weights.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights.read(name), tensor), name


def test_what_megatron_has_written_is_read_to_the_bit():
    model = open_model(FROZEN)
    same(model.weights, torch_dist.seeded("llama"))
    wanted = torch_dist.MODELS["llama"]
    found = model.config.to_dict()
    differs = {k for k, v in wanted.items() if k in found and found[k] != v}
    assert model.kind == "torch_dist" and not differs


def test_it_becomes_ours_and_a_published_model(tmp_path):
    for words in (
        f"--load {FROZEN} --to ours --save {tmp_path / 'ours'}",
        f"--loader core --saver hf --load-dir {FROZEN} --save-dir {tmp_path / 'published'}",
        f"--load {tmp_path / 'ours'} --to torch_dist --save {tmp_path / 'back'}",
    ):
        assert main(words.split()) == 0
    for folder in ("ours", "published", "back"):
        same(open_model(tmp_path / folder).weights, torch_dist.seeded("llama"))


# ------------------------------------------------------------------------------------------------ optimizers


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"


def test_the_buckets_of_an_optimizer_are_named_and_left_only_where_that_was_asked_for(tmp_path, capsys):
    """What is read of an optimizer: `test_megatron_optimizer.py`."""
    theirs = TorchDist(FROZEN)
    tensors = {name: theirs.read(name) for name in theirs.tensors}
    tensors |= {name: torch.ones(4) for name in (BUCKET, f"chained_1.{BUCKET}")}
    args = vars(torch_dist.arguments(torch_dist.MODELS["llama"]))
    write_torch_dist(InMemory(tensors), args, [], tmp_path / "theirs")
    words = f"--load {tmp_path / 'theirs'} --save {tmp_path / 'ours'} --to ours"
    named = r"the state of an optimizer \(2 tensors and objects, dp_reshardable, the first is chained_1"
    with pytest.raises(CheckpointError, match=f"{named}.* is stored in a form that is not read") as said:
        main(words.split())
    assert "--no-load-optim converts the weights alone" in str(said.value) and not (tmp_path / "ours").exists()
    assert main([*words.split(), "--no-load-optim"]) == 0
    assert "left where it is: the state of an optimizer (2 tensors" in capsys.readouterr().out
    same(open_model(tmp_path / "ours").weights, torch_dist.seeded("llama"))


# ------------------------------------------------------------------------------------------------ pickles


class _Planted:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def copied(tmp_path) -> Path:
    return Path(shutil.copytree(FROZEN, tmp_path / "checkpoint"))


def archive(payload: bytes, like: bytes = b"") -> bytes:
    """A `torch.save` archive whose pickle is this."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/data.pkl", payload)
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/data/0", like)
    return out.getvalue()


def test_a_planted_pickle_never_runs(copied, tmp_path):
    trace = tmp_path / "executed"
    payload = pickle.dumps({"args": _Planted(trace)})
    pickle.loads(payload)
    trace.rmdir()  # so it works, where it is executed

    metadata = (copied / ".metadata").read_bytes()
    (copied / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError, match="posix.mkdir, which does not belong here"):
        TorchDist(copied)
    (copied / ".metadata").write_bytes(metadata)

    _, path, start, length = next(iter(TorchDist(copied)._chunks["output_layer.weight"].values()))
    planted, content = archive(payload), bytearray(path.read_bytes())
    assert len(planted) <= length
    content[start : start + length] = planted.rjust(length, b"\0")  # a zip is read from its end
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="posix.mkdir, which does not belong here"):
        TorchDist(copied).read("output_layer.weight")

    (copied / "common.pt").write_bytes(archive(payload))
    assert read_common(copied) == {}
    assert not trace.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_what_pickle_says(protocol):
    data = {"a": [1, -2, 3.5, None, True, False], ("b", 2): {"c": "é" * 300}, "d": (), "e": (1, 2, 3, 4), "f": 10**12}
    assert read_pickle(pickle.dumps(data, protocol), "here") == data


def test_what_a_pickle_would_have_called_is_a_note():
    built = read_pickle(pickle.dumps(_Planted(Path("never"))), "here")
    assert (built.name, built.args) == (f"{os.mkdir.__module__}.mkdir", ("never",))


@pytest.mark.parametrize(
    "payload", [b"", b"\x80\x04", b"\x80\x04.", b"\x80\x04K\x01", b"\x80\x04]K\x01b.", b"(d0.", b"\x80\x02h\x05."]
)
def test_a_pickle_that_is_broken_is_refused(payload):
    with pytest.raises(CheckpointError, match="the pickle"):
        read_pickle(payload, "here")


def test_bytes_that_changed_are_an_error_of_ours_or_change_numbers_only(copied):
    """Whatever is flipped in what is parsed, nothing but a CheckpointError comes out."""
    draw, metadata, refused = random.Random(0), (copied / ".metadata").read_bytes(), 0
    for _ in range(60):
        changed = bytearray(metadata)
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        (copied / ".metadata").write_bytes(changed[: draw.choice((len(changed), draw.randrange(len(changed))))])
        try:
            found = TorchDist(copied)
            for name in found.tensors:
                found.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 30


# ------------------------------------------------------------------------------------------------ written


MODELS = {
    "gpt2": {},
    "llama": {"num_query_groups": 2},
    "mixtral": {"num_experts": 4, "moe_router_topk": 2},
    "qwen3_moe": {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": "[0,1,1]", "num_query_groups": 1},
}


def drawn(config: Any) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {n: torch.randn(d.shape, generator=made).to(d.dtype) for n, d in logical_tensors(config).items()}


@pytest.mark.parametrize("family", MODELS)
def test_torch_reads_what_is_written_and_so_do_we(family, tmp_path):
    import torch.distributed.checkpoint as dcp

    config = family_config(family, vocab_size=99, num_layers=3, hidden_size=32, **MODELS[family])
    state = drawn(config)
    theirs = as_theirs(InMemory(state), config)
    write_release(theirs, args_of(config), extra_states(theirs), tmp_path / "written")
    model = open_model(tmp_path / "written")
    same(model.weights, state)
    assert model.config.expert_layers == config.expert_layers and model.config.activation == config.activation
    by_torch = {name: torch.empty(d.shape, dtype=d.dtype) for name, d in theirs.tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(by_torch, storage_reader=dcp.FileSystemReader(tmp_path / "written" / "release"), no_dist=True)
    for name, tensor in by_torch.items():
        assert torch.equal(tensor, theirs.read(name)), name
    words = by_torch["embedding.word_embeddings.weight"]
    assert words.shape[0] == 128 and not words[99:].any()


def test_an_expert_that_is_missing_is_not_zeros():
    config = family_config("mixtral", vocab_size=99, num_layers=1, hidden_size=32, **MODELS["mixtral"])
    experts = "decoder.layers.0.mlp.experts.experts"
    for missing, numbers in ((None, range(4)), (2, (0, 1, 3))):
        tensors = {f"{experts}.{e}.linear_fc2.weight": torch.full((2, 3), float(e)) for e in numbers}
        if missing is None:
            assert as_ours(InMemory(tensors), config).read("decoder.layers.0.mlp.experts.weight2")[
                :, 0, 0
            ].tolist() == [*map(float, numbers)]
            continue
        with pytest.raises(CheckpointError, match="decoder.layers.0.mlp.experts.weight2 lacks expert 2"):
            as_ours(InMemory(tensors), config)


ARGS = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "padded_vocab_size": 64}


def test_arguments_without_a_counterpart_are_refused():
    for name, value in {"window_size": (7, 0), "use_rope_scaling": True, "multi_latent_attention": True}.items():
        with pytest.raises(ConfigError, match=name):
            config_from_args({**ARGS, name: value}, 60)
    with pytest.raises(ConfigError, match="--true-vocab-size"):
        config_from_args(ARGS, None)
    config = config_from_args({**ARGS, "num_query_groups": 1, "add_bias_linear": False}, 60)
    assert (config.vocab_size, config.num_query_groups, config.activation) == (60, 4, "gelu")
    with pytest.raises(ConfigError, match="yarn|rope_scaling"):
        args_of(family_config("llama", rope_scaling_type="linear"))


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_norms_of_outputs_are_no_model_of_megatrons(family):
    """Its tensors would all have a place: the fields say that the model is another one."""
    with pytest.raises(ConfigError, match=r"not written(.|\n)*layernorm_placement: '\w+' here, 'input' there"):
        args_of(family_config(family, vocab_size=99, num_layers=2, hidden_size=32, num_attention_heads=4))


def megatron(*words: Any) -> str:
    """Megatron, in processes of its own."""
    line = [sys.executable, "-m", "tests.oracle.torch_dist", *map(str, words)]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=300).stdout


@THOROUGH
@pytest.mark.parametrize(
    ("name", "tp", "pp", "homogeneous"),
    [("gpt", 2, 2, True), ("qwen", 1, 2, False), ("gpt2", 2, 1, True), ("moe", 1, 1, True)],
)
def test_megatron_writes_and_we_read(name, tp, pp, homogeneous, tmp_path):
    pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core==0.16.1")
    megatron("write", tmp_path, name, tp, pp, "stacked" if homogeneous else "numbered")
    same(open_model(tmp_path).weights, torch_dist.seeded(name))


@THOROUGH
@pytest.mark.parametrize(
    ("name", "tp", "pp"), [("gpt", 2, 1), ("llama", 1, 2), ("qwen", 2, 2), ("gpt2", 1, 1), ("moe", 1, 1)]
)
def test_we_write_and_megatron_reads(name, tp, pp, tmp_path):
    pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core==0.16.1")
    state = torch_dist.seeded(name)
    config = config_from_args(vars(torch_dist.arguments(torch_dist.MODELS[name])), None)
    theirs = as_theirs(InMemory(state), config.replace(make_vocab_size_divisible_by=64))
    write_release(theirs, args_of(config), extra_states(theirs), tmp_path / "written")
    strays = json.loads(megatron("read", tmp_path / "written" / "release", name, tp, pp))
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")  # their padding is drawn, ours is 0
    assert len(strays) > 6 and all(stray == 0.0 for key, stray in strays.items() if key not in padded), strays
