"""Prediction of several tokens: the gradient of the sum written out, and the same in every layout."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import ConfigError
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.models.mtp import depth_losses
from minimegatron.parallel.data import finalize
from minimegatron.training.flops import forward_flops
from tests.axes import CP, EP, PP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case, compare_all, compare_with_serial, microbatch, problems, weights

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


LAYOUTS: list[dict[str, Any]] = [
    {TP: 2}, {TP: 2, SP: True}, {CP: 2}, {CP: 2, TP: 2, SP: True}, {CP: 2, "cp_comm_type": "a2a"}
]  # fmt: skip


@pytest.mark.parametrize("layout", mostly_thorough(LAYOUTS, [0, 3, 4]), ids=str)
def test_layouts(assert_same_as_serial, layout):
    assert_same_as_serial(Case(layout, DEPTHS, double=True, documents=CP in layout))


DEEPSEEK: dict[str, Any] = {
    **DEPTHS, "family": "deepseek_v3", "num_query_groups": 4, "kv_lora_rank": 12, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6, "v_head_dim": 10, "num_experts": 4, "moe_ffn_hidden_size": 24,
    "moe_layer_freq": "[0,1]", "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.1,
}  # fmt: skip


def test_with_experts_and_latents(assert_same_as_serial):
    for layout in ({EP: 2}, {TP: 2, SP: True, EP: 2, "expert_tensor_parallel_size": 1}):
        assert_same_as_serial(Case(layout, DEEPSEEK, double=True), dp=2 if TP not in layout else 1)


def test_counts():
    config = Case({}, {**DEPTHS, "num_experts": 4, "moe_layer_freq": "[0,1]", "vocab_size": 60}).config
    none = Case({}, {"num_experts": 4, "moe_layer_freq": "[0,1]", "vocab_size": 60}).config
    more, less = forward_flops(config, 8), forward_flops(none, 8)
    assert more["attention"] == 2 * less["attention"] and more["logits"] == 3 * less["logits"]


# ------------------------------------------------------------------------------------------------ pipelines

FOUR: dict[str, Any] = {**DEPTHS, "num_layers": 4}
TIED: dict[str, Any] = {**FOUR, "untie_embeddings_and_output_weights": False}
POSITIONS = {"position_embedding_type": "learned_absolute"}
TWO_CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2}


def pipelined(layout: dict[str, Any], model: dict[str, Any], **more: Any) -> Case:
    size = {PP: 2, **layout}
    return Case(size, model, **{"accumulation": 2 * size[PP], "double": True, "micro_batch_size": 1, **more})


PIPELINES = {
    2: [
        pipelined({}, {**DEPTHS, **POSITIONS}),
        pipelined({}, TIED),
        pipelined({"pipeline_schedule": "zb_h1"}, TIED),
        pipelined({"pipeline_schedule": "interleaved", **TWO_CHUNKS}, {**FOUR, **POSITIONS}, documents=True),
        pipelined({"pipeline_schedule": "zb_v"}, {**TIED, **POSITIONS}),
        pipelined({"pipeline_schedule": "dualpipe_v"}, FOUR),
        pipelined({"pipeline_model_parallel_layout": "Ettt|tmmL"}, {**FOUR, "recompute_granularity": "full"}),
    ],
    4: [
        pipelined({PP: 4}, FOUR),
        pipelined({TP: 2, SP: True}, {**TIED, **POSITIONS}),
        pipelined({CP: 2}, FOUR, documents=True),
        pipelined({"pipeline_schedule": "interleaved", **TWO_CHUNKS}, TIED, overlap=True, bucket_size=2000),
        pipelined({"pipeline_schedule": "zb_h1", TP: 2, SP: True}, FOUR),
        pipelined({EP: 2}, DEEPSEEK),
    ],
}


@pytest.mark.parametrize("world", mostly_thorough(PIPELINES, [0]))
def test_in_a_pipeline(ranks, world):
    for reports in ranks(world).run(compare_all, PIPELINES[world], timeout=120):
        for one, report in zip(PIPELINES[world], reports, strict=True):
            assert problems(report, 1e-10) == [], one


def without_the_sum(rank: int, world: int, case: Case) -> dict[str, Any]:
    with mock.patch.object(finalize, "sum_tied_gradients", lambda model, mesh: None):
        return compare_with_serial(rank, world, case)


def test_a_copy_whose_gradient_stays_alone_is_seen(ranks):
    for report in ranks(2).run(without_the_sum, PIPELINES[2][0]):
        wrong = [text for text in problems(report, 1e-6) if "gradient of" in text]
        assert len(wrong) == 2 and all("embedding" in text for text in wrong)


@pytest.mark.parametrize(
    "layout, words", [("Ett|ttmL", "has 1 m, mtp_num_layers is 2"), ("Ettmm|ttL", "every m right before it")]
)
def test_predictions_that_a_written_layout_puts_elsewhere(layout, words):
    with pytest.raises(ConfigError, match=words):
        check_model_fits(
            Case({}, FOUR).config, ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
        )


# ------------------------------------------------------------------------------------------------ for the log


def test_what_is_logged_is_the_mean_over_the_tokens_that_count():
    """In the words of the module: sum_i m_{i+k} l^k_i / sum_i m_{i+k}, whatever the loss is multiplied by."""
    case = Case({}, DEPTHS, documents=True)
    model, batch = model_of(case), microbatch(case, 0, 0)
    mask = batch["loss_mask"]
    for _ in range(2):
        loss = model(batch["tokens"], None, batch["labels"], document_ids=batch["document_ids"]) * mask
        (loss.sum() * 1e-3).backward()
    with torch.no_grad():
        model(batch["tokens"], None, batch["labels"], document_ids=batch["document_ids"])
    found = depth_losses(model, 1e-3)
    assert list(found) == ["mtp_1 loss", "mtp_2 loss"] and not depth_losses(model, 1.0)["mtp_1 loss"].any()
    for k, (total, count) in enumerate(found.values(), 1):
        same = batch["document_ids"][:, k:] == batch["document_ids"][:, :-k]
        assert count.item() == pytest.approx(2 * (mask[:, k:] * same).sum().item(), rel=1e-12)
        assert total.item() == pytest.approx(2 * depth_loss(model, batch, k), rel=1e-12)


def depth_loss(model: GPTModel, batch: dict[str, torch.Tensor], k: int) -> float:
    """The sum of depth k's losses over the tokens that count, from the losses the model computes."""
    assert model.mtp is not None
    found: list[torch.Tensor] = []
    losses = model._losses

    def remember(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found.append(losses(hidden, labels))
        return found[-1]

    with mock.patch.object(model, "_losses", remember):
        model(batch["tokens"], None, batch["labels"], document_ids=batch["document_ids"])
    same = batch["document_ids"][:, k:] == batch["document_ids"][:, :-k]
    return (found[k][:, :-k] * batch["loss_mask"][:, k:] * same).sum().item()
