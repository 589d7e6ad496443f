"""A published folder is read, or the error names the file that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimegatron.checkpoint.conversion import open_model
from minimegatron.checkpoint.hf_folder import INDEX, open_published
from minimegatron.errors import CheckpointError
from tests.models.test_huggingface import hf_model


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    hf_model("llama2").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(published, tmp_path) -> Path:
    for file in published.glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def read(folder: Path) -> dict[str, torch.Tensor]:
    weights = open_published(folder)[2]
    return {name: weights.read(name) for name in weights.tensors}


def test_the_authors_own_copy_is_not_read(folder):
    """As Mistral publishes it: the same weights in other names; and what else transformers passes over."""
    import transformers

    before = read(folder)
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"):
        save_file({"tok_embeddings.weight": torch.ones(3)}, folder / name)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    after = read(folder)
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).model.norm.weight
    assert torch.equal(after["decoder.final_layernorm.weight"], theirs)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="no model.safetensors, .*there are adapter_model.safetensors, consolidated"
    ):
        read(folder)


SHARD = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (INDEX, f"two sets of weights: model.safetensors and {INDEX}"),
        (SHARD, f"two sets of weights: model.safetensors and {SHARD}"),
        ("adapter_config.json", "adapter_config.json: an adapter"),
        ("iter_0000020/manifest.json", "two models: config.json of a published one, and the checkpoint iter_0000020"),
    ],
)
def test_two_sets_of_weights_are_refused_by_their_names(folder, beside, said):
    """transformers takes the single file, or adds the adapter; a reader that prefers the index has other numbers."""
    tensors = {n: 2 * t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / SHARD)
    index = {"weight_map": dict.fromkeys(tensors, SHARD)}
    (folder / beside).parent.mkdir(exist_ok=True)
    if beside != SHARD:
        (folder / beside).write_text(json.dumps(index))
    if beside == "adapter_config.json":
        (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=said) as caught:
        open_model(folder)
    assert caught.value.fix and len(str(caught.value).splitlines()) <= 6


def test_the_index_says_which_files(folder):
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}  # not the file's own pages
    before = {n: t.clone() for n, t in read(folder).items()}
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, mine in halves.items():
        save_file({n: tensors[n] for n in mine}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, mine in halves.items() for n in mine}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    after = read(folder)
    assert all(torch.equal(after[k], before[k]) for k in before)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no .*model-00002-of-00002"):
        read(folder)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}  # of one file, as some have it
    (folder / INDEX).write_text(json.dumps(index))
    save_file(tensors, folder / "model.safetensors")
    assert all(torch.equal(read(folder)[k], before[k]) for k in before)


def test_a_download_that_broke_off(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="model.safetensors") as caught:
            read(folder)
        assert caught.value.exit_code == CheckpointError("", fix="").exit_code and "download" in str(caught.value)


def test_a_configuration_that_is_no_json(folder):
    for text in ("{", "[]", ""):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="config.json"):
            read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no .*config.json"):
        read(folder)


def test_gpt2_as_it_was_first_published(tmp_path):
    """Without the name of the whole model before each tensor, with buffers among them."""
    hf_model("gpt2").save_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in read(tmp_path).items()}
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor.clone() for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file)
    after = read(tmp_path)
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
