"""The Mamba-2 mixer: packed documents, precision, initial values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import ConfigError, DataError, RankError
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.logical import draw, draw_part, initialize
from minimegatron.layers.param import ParamLayout, cut_evenly, layout_of
from minimegatron.layers.ssm.mixer import MambaMixer
from minimegatron.models.decoder import GPTModel, build_model
from tests.twin import weights

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "vocab_size": 40, "hybrid_override_pattern": "MM", "mamba_num_heads": 8,
    "mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_state_dim": 6, "mamba_chunk_size": 5, "normalization": "RMSNorm",
    "position_embedding_type": "none",
}  # fmt: skip
DOCUMENTS = (4, 1, 7, 2)  # shorter than the convolution's reach, longer than a chunk, ending with the sequence


def mixer_of(dtype: torch.dtype = torch.float64, **fields: Any) -> MambaMixer:
    """A mixer whose numbers are all random."""
    config = TransformerConfig(**{**SIZES, **fields})
    mixer, drawn = MambaMixer(config, Mesh.serial()), weights(config, 1)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            param.copy_(drawn[f"decoder.layers.0.self_attention.{name}"])
    return mixer.to(dtype)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_packed_documents_are_as_if_alone():
    mixer, x = mixer_of(), normal(sum(DOCUMENTS), 1, 32)
    ids = torch.repeat_interleave(torch.tensor([3, 5, 3, 4]), torch.tensor(DOCUMENTS))[None]  # an id may come again
    packed = mixer(x, AttentionContext(mask=AttentionMask(document_ids=ids)))
    alone = torch.cat([mixer(part, AttentionContext()) for part in x.split(DOCUMENTS)])
    assert (packed - alone).abs().max() <= 1e-12
    assert (mixer(x, AttentionContext()) - alone).abs().max() > 1e-3, "a state that passed a border would not be seen"


def test_a_chunk_size_is_how_and_not_what():
    x = normal(13, 2, 32)
    one, *others = (mixer_of(mamba_chunk_size=size)(x, AttentionContext()) for size in (1, 4, 13, 100))
    assert all((one - other).abs().max() <= 1e-12 for other in others)


def test_decays_are_computed_in_fp32():
    """Their logarithms add up over the sequence: bf16 would lose 1 of 256 of each."""
    x = normal(64, 1, 32)
    exact, rounded = mixer_of(), mixer_of(torch.bfloat16)
    dt = torch.linspace(-3, 3, 8, dtype=torch.bfloat16).expand(5, 1, 8)
    assert rounded._dt(dt).dtype == rounded._A().dtype == torch.float32
    wide = torch.nn.functional.softplus(dt.double() + rounded.dt_bias.double())
    assert (rounded._dt(dt) - wide).abs().max() <= 1e-6
    y, want = rounded(x.bfloat16(), AttentionContext()), exact(x, AttentionContext())
    assert y.dtype == torch.bfloat16 and (y - want).abs().max() <= 0.03 * want.abs().max()


def test_initial_values_are_those_of_the_papers():
    config = TransformerConfig(**{**SIZES, "mamba_num_heads": 2048})
    with torch.device("meta"):
        mixer = MambaMixer(config, Mesh.serial())
    initialize(mixer, 0, "cpu")
    steps, A = torch.nn.functional.softplus(mixer.dt_bias).detach(), mixer.A_log.detach().exp()
    assert steps.min() >= 0.9e-3 and steps.max() <= 0.11 and 0.5 * (steps.log().min() + steps.log().max()) < -4
    assert abs(steps.log().mean() - torch.tensor(1e-2).log()) < 0.2, "log-uniform in [0.001, 0.1]"
    assert 1 <= A.min() and A.max() <= 16 and abs(A.mean() - 8.5) < 0.5
    taps = mixer.conv1d.weight
    assert taps.abs().max() <= 0.5 and abs(taps.std() - 0.5 / 3**0.5) < 0.02 and (mixer.D == 1).all()


def test_a_rank_draws_its_part_of_them():
    of_one = layout_of(mixer_of().in_proj.weight)
    for name, blocks in (("A_log", (8,)), ("in_proj.weight", (32, 32, 24, 24, 8))):
        whole = layout_of(mixer_of().get_parameter(name))
        axis = Axis("tp", (0, 1), 1)
        half = ParamLayout(whole.shape, 0, cut_evenly(whole.shape[0], axis, "x", blocks), 1, whole.init)
        assert torch.equal(draw_part(name, half, 5), half.take(draw(name, whole, 5)))
    assert of_one.parts[0] == ((0, 32), (32, 64), (64, 88), (88, 112), (112, 120))


def test_tp_divides_groups():
    config = TransformerConfig(**{**SIZES, "mamba_num_groups": 2})
    check_model_fits(config, ParallelConfig(tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match=r"\(4\) does not divide mamba_num_groups \(2\)"):
        check_model_fits(config, ParallelConfig(tensor_model_parallel_size=4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hybrid_override_pattern": "MX"}, r"has \['X'\]"),
        ({"hybrid_override_pattern": "M"}, "says 1 layers, num_layers is 2"),
        ({"hybrid_override_pattern": "ME"}, "with num_experts=None"),
        ({"num_experts": 4, "add_bias_linear": False}, "with num_experts=4"),
        ({"mtp_num_layers": 1}, "with mtp_num_layers=1"),
        ({"transformer_impl": "transformer_engine"}, "with transformer_impl='transformer_engine'"),
        ({"mamba_num_groups": 3}, r"\(3\) does not divide mamba_num_heads \(8\)"),
        ({"mamba_num_heads": None, "mamba_head_dim": 5}, r"\(5\) does not divide 2 hidden_size \(64\)"),
        ({"mamba_dt_limit_min": 0.2, "mamba_dt_limit_max": 0.1}, "mamba_dt_limit_min=0.2"),
    ],
)
def test_what_is_refused(change, said):
    with pytest.raises(ConfigError, match=said) as caught:
        TransformerConfig(**{**SIZES, **change})
    assert caught.value.fix


def on_short_pieces(rank: int, world: int) -> None:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
    model = build_model(TransformerConfig(**SIZES), mesh, 0)
    model(torch.zeros(1, 4, dtype=torch.int64))


def test_pieces_are_not_shorter_than_the_convolution_sees(ranks):
    with pytest.raises(RankError, match="a piece of 2 tokens: the convolution sees 3 tokens before each") as caught:
        ranks(2).run(on_short_pieces)
    assert DataError.__name__ in str(caught.value)


def test_adapters_have_no_place_in_it():
    with pytest.raises(ConfigError, match="none of the layers 0, 1 has one of lora_target_modules"):
        GPTModel(TransformerConfig(**SIZES, lora_rank=2), Mesh.serial())
