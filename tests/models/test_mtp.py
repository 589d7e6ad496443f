"""Prediction of several tokens: the gradient of the sum written out, and the same in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, check_model_fits
from minimegatron.errors import ConfigError
from minimegatron.layers.attention import AttentionContext
from minimegatron.layers.mask import AttentionMask
from minimegatron.layers.param import load_logical, logical_parameters
from minimegatron.models.decoder import GPTModel, build_model
from minimegatron.models.zoo import count_parameters
from minimegatron.training.flops import forward_flops
from tests.test_config import rank_of_tp
from tests.twin import Case, microbatch, weights

TP, SP, CP, EP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "expert_model_parallel_size",
)
DEPTHS: dict[str, Any] = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.6}


def model_of(case: Case) -> GPTModel:
    model = GPTModel(case.config, Mesh.serial())
    load_logical(model, weights(case.config, case.seed))
    return model.double()


def written_out(model: GPTModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """sum m_i l_i + lambda/D sum_k sum_i m_{i+k} l^k_i, token by token."""
    tokens, labels, mask = batch["tokens"], batch["labels"], batch["loss_mask"].double()
    documents = batch.get("document_ids", torch.zeros_like(tokens))
    b, s = tokens.shape
    places = torch.arange(s).expand(b, s)
    context = AttentionContext(model.rotary(places), AttentionMask(document_ids=batch.get("document_ids")))
    hidden = model.decoder(model.embedding(tokens, places), context)

    def losses(hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = model.logits(hidden)[..., : model.config.vocab_size]
        return F.cross_entropy(logits.flatten(0, 1), wanted.t().flatten(), reduction="none").view(s, b).t()

    total = (mask * losses(hidden, labels)).sum()
    assert model.mtp is not None
    for k, layer in enumerate(model.mtp.layers, 1):
        seen, wanted = torch.zeros_like(labels), torch.zeros_like(labels)
        weight = torch.zeros_like(mask)
        for i in range(s):
            seen[:, i] = labels[:, (i + k - 1) % s]
            if i + k < s:
                wanted[:, i] = labels[:, i + k]
                weight[:, i] = mask[:, i + k] * (documents[:, i + k] == documents[:, i])
        x = torch.cat([layer.enorm(model.embedding(seen, places)), layer.hnorm(hidden)], -1)
        hidden = layer.final_layernorm(layer.transformer_layer(layer.eh_proj(x), context))
        total = total + 0.6 / 2 * (weight * losses(hidden, wanted)).sum()
    return total


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_the_sum_written_out(tied, documents):
    case = Case({}, {**DEPTHS, "untie_embeddings_and_output_weights": not tied}, documents=documents)
    model, batch = model_of(case), microbatch(case, 0, 0)
    found = []
    for loss in (
        lambda: (
            model(batch["tokens"], None, batch["labels"], document_ids=batch.get("document_ids")) * batch["loss_mask"]
        ).sum(),
        lambda: written_out(model, batch),
    ):
        model.zero_grad()
        loss().backward()
        found.append({n: p.grad.clone() for n, p in logical_parameters(model)})
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-10, atol=1e-12, msg=name)
    assert all(want.any() for name, want in found[1].items()), "every parameter, of every depth, has a gradient"


def test_the_loss_that_is_returned_is_that_of_the_next_token():
    case = Case({}, DEPTHS)
    model, batch = model_of(case), microbatch(case, 0, 0)
    trained = model(batch["tokens"], None, batch["labels"])
    assert torch.equal(trained, model.eval()(batch["tokens"], None, batch["labels"]))


@pytest.mark.parametrize(
    "layout", [{TP: 2}, {TP: 2, SP: True}, {CP: 2}, {CP: 2, TP: 2, SP: True}, {CP: 2, "cp_comm_type": "a2a"}], ids=str
)
def test_layouts(assert_same_as_serial, layout):
    assert_same_as_serial(Case(layout, DEPTHS, double=True, documents=CP in layout))


def test_with_experts_and_latents(assert_same_as_serial):
    model = {
        **DEPTHS, "family": "deepseek_v3", "num_query_groups": 4, "kv_lora_rank": 12, "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 6, "v_head_dim": 10, "num_experts": 4, "moe_ffn_hidden_size": 24,
        "moe_layer_freq": "[0,1]", "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.1,
    }  # fmt: skip
    for layout in ({EP: 2}, {TP: 2, SP: True, EP: 2, "expert_tensor_parallel_size": 1}):
        assert_same_as_serial(Case(layout, model, double=True), dp=2 if TP not in layout else 1)


def test_counts():
    config = Case({}, {**DEPTHS, "num_experts": 4, "moe_layer_freq": "[0,1]", "vocab_size": 60}).config
    model = build_model(config, rank_of_tp(ParallelConfig(), 0), 0)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    none = Case({}, {"num_experts": 4, "moe_layer_freq": "[0,1]", "vocab_size": 60}).config
    more, less = forward_flops(config, 8), forward_flops(none, 8)
    assert more["attention"] == 2 * less["attention"] and more["logits"] == 3 * less["logits"]


def test_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match="embedding, which is on the first"):
        check_model_fits(Case({}, DEPTHS).config, ParallelConfig(pipeline_model_parallel_size=2))
