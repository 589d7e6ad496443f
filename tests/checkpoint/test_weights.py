"""Every command reads weights by one way: what does not fit the configuration is refused, a corner of it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimegatron.checkpoint.conversion import open_model
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.generate import load
from minimegatron.errors import MinimegatronError
from tests.checkpoint.test_continued import trainer_of
from tests.checkpoint.test_convert import change_config, edit, publish, refused

pytest.importorskip("transformers")

LARGER: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "inner width": ({"intermediate_size": 80}, {}, r"linear_fc[12].weight has shape .*96"),
    "norm of two dims": ({}, {"model.norm.weight": (1, 64)}, r"final_layernorm.weight has shape \(1, 64\)"),
    "a word more": ({"vocab_size": 100}, {}, r"word_embeddings.weight has shape \(99, 64\), .* it is \(100, 64\)"),
}


@pytest.mark.parametrize("what", LARGER)
def test_a_tensor_that_is_larger_than_the_configuration_says_is_read_by_no_command(tmp_path, what):
    config, tensors, said = LARGER[what]
    folder = publish("llama2", tmp_path / "published")
    edit(folder, **{name: torch.ones(shape) for name, shape in tensors.items()})
    change_config(folder, **config)

    def generates() -> None:
        load(open_model(folder), Mesh.serial(), "fp32")

    def trains() -> None:
        trainer_of(f"--load {folder}")

    for command in (generates, trains):
        with pytest.raises(MinimegatronError, match=said) as error:
            command()
        assert error.value.exit_code == 3 and error.value.fix and len(str(error.value).splitlines()) <= 6
    refused("--load", folder, "--save", tmp_path / "ours")


def test_what_fits_is_read_whole(tmp_path):
    folder = publish("llama2", tmp_path / "published")
    model = load(open_model(folder), Mesh.serial(), "fp32")
    theirs = load_file(folder / "model.safetensors")
    assert torch.equal(model.output_layer.weight[:99], theirs["lm_head.weight"])
    assert not model.output_layer.weight[99:].any(), "padding of the vocabulary"
