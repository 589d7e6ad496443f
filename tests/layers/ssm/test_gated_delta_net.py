"""Gated DeltaNet: packed documents, precision, initial values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import ConfigError
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import layout_of
from minimegatron.layers.ssm.gated_delta_net import GatedDeltaNet
from tests.layers.ssm.test_mixer import DOCUMENTS, normal
from tests.twin import weights

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "vocab_size": 40, "linear_attention_freq": "2", "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 4, "linear_chunk_size": 5,
    "normalization": "RMSNorm", "position_embedding_type": "rope",
}  # fmt: skip


def mixer_of(dtype: torch.dtype = torch.float64, **fields: Any) -> GatedDeltaNet:
    """A mixer whose numbers are all random."""
    config = TransformerConfig(**{**SIZES, **fields})
    mixer, drawn = GatedDeltaNet(config, Mesh.serial()), weights(config, 1)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            param.copy_(drawn[f"decoder.layers.0.self_attention.{name}"])
    return mixer.to(dtype)


def test_packed_documents_are_as_if_alone():
    mixer, x = mixer_of(), normal(sum(DOCUMENTS), 1, 32)
    ids = torch.repeat_interleave(torch.tensor([3, 5, 3, 4]), torch.tensor(DOCUMENTS))[None]  # an id may come again
    packed = mixer(x, AttentionContext(mask=AttentionMask(document_ids=ids)))
    alone = torch.cat([mixer(part, AttentionContext()) for part in x.split(DOCUMENTS)])
    assert (packed - alone).abs().max() <= 1e-12
    assert (mixer(x, AttentionContext()) - alone).abs().max() > 1e-3, "a state that passed a border would not be seen"


def test_gates_are_computed_in_fp32():
    """The logarithms of decays add up over the sequence: bf16 would lose 1 of 256 of each."""
    x = normal(64, 1, 32)
    exact, rounded = mixer_of(), mixer_of(torch.bfloat16)
    a = torch.linspace(-3, 3, 8, dtype=torch.bfloat16).expand(5, 1, 8)
    for got, want in zip(
        rounded._gates(a, a), mixer_of(torch.bfloat16).double()._gates(a.double(), a.double()), strict=True
    ):
        assert got.dtype == torch.float32 and (got - want).abs().max() <= 1e-6 * want.abs().max()
    y, want = rounded(x.bfloat16(), AttentionContext()), exact(x, AttentionContext())
    assert y.dtype == torch.bfloat16 and (y - want).abs().max() <= 0.05 * want.abs().max()


def test_initial_values():
    """Decays of 1 to 16 times softplus, as in Megatron-LM."""
    with torch.device("meta"):
        mixer = GatedDeltaNet(TransformerConfig(**{**SIZES, "linear_num_value_heads": 2048}), Mesh.serial())
    initialize(mixer, 0, "cpu")
    A = mixer.A_log.detach().exp()
    assert 1 <= A.min() and A.max() <= 16 and abs(A.mean() - 8.5) < 0.5
    assert (mixer.dt_bias == 1).all() and (mixer.out_norm.weight == 1).all() and mixer.conv1d.bias is None
    assert layout_of(mixer.out_norm.weight).partial == "heads"


def test_layers_by_a_frequency_or_one_by_one():
    config = TransformerConfig(**{**SIZES, "num_layers": 8, "linear_attention_freq": "4"})
    assert [n for n in range(8) if "self_attention" in config.parts_of(n)] == [3, 7]
    listed = config.replace(linear_attention_freq="([1]*3+[0]*1+[1]*3+[0]*1)")
    assert listed.linear_layers == config.linear_layers and "gated_delta_net" in config.parts_of(0)


def test_tp_divides_key_heads():
    config = TransformerConfig(**{**SIZES, "linear_num_key_heads": 2})
    check_model_fits(config, ParallelConfig(tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match=r"\(4\) does not divide linear_num_key_heads \(2\)"):
        check_model_fits(config, ParallelConfig(tensor_model_parallel_size=4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_attention_freq": "[1,0,1]"}, "says 3 layers, num_layers is 2"),
        ({"linear_attention_freq": "[0,0]"}, "gives none of 2 layers"),
        ({"linear_attention_freq": "x"}, "neither a number nor a pattern"),
        ({"linear_num_value_heads": 6}, r"\(4\) does not divide linear_num_value_heads \(6\)"),
        ({"hybrid_override_pattern": "**"}, r"linear_attention_freq with hybrid_override_pattern='\*\*'"),
        ({"transformer_impl": "transformer_engine"}, "linear_attention_freq with transformer_impl"),
        ({"multi_latent_attention": True, "attention_output_gate": True, "add_bias_linear": False}, "output no gate"),
    ],
)
def test_what_is_refused(change, said):
    with pytest.raises(ConfigError, match=said) as caught:
        TransformerConfig(**{**SIZES, **change})
    assert caught.value.fix
