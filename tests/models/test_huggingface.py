"""Logits and weights equal to Hugging Face transformers', for every dense family and tp layout."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch

from minimegatron.checkpoint.hf_config import config_from_huggingface, config_to_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface, state_to_huggingface
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.logical import gather_logical, load_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.layers.ssm.delta_rule import DeltaRule
from minimegatron.models.chunks import ModelChunks, count_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.pipeline.plain import run
from minimegatron.parallel.pipeline.stage import ModuleStage
from tests.axes import CP, EP, ETP, SP, TP
from tests.layers.ssm.test_delta_rule import a_state as delta_state
from tests.layers.ssm.test_delta_rule import inputs as delta_inputs
from tests.layers.ssm.test_scan import gradients
from tests.models.in_fp64 import in_fp64
from tests.thorough import mostly_thorough

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99,
                            "bos_token_id": 0, "eos_token_id": 0}),
    "llama2": ("LlamaConfig", SIZES),
    "llama2-mha-bias": ("LlamaConfig", {**SIZES, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3.1": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA31}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 7}),
    "qwen2.5": ("Qwen2Config", SIZES),
    "qwen2.5-tied-mqa": ("Qwen2Config", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2.5-yarn": ("Qwen2Config", {**SIZES, "rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 32}),
    # caps that are reached, a scale that is not 1 / sqrt(d), a window shorter than the sequence in every other layer
    "gemma2": ("Gemma2Config", {**SIZES, "head_dim": 24, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 1.5,
                                "final_logit_softcapping": 2.0, "sliding_window": 7}),
    # 40 positions are ten windows, and both bases and the scaling show by then
    "gemma3": ("Gemma3TextConfig", {**SIZES, "num_hidden_layers": 4, "head_dim": 24, "query_pre_attn_scalar": 10,
                                    "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                                    "rope_parameters": TWO_BASES}),
    "olmo2": ("Olmo2Config", {**SIZES, "num_key_value_heads": 4}),
    # time steps that reach both limits, a chunk that does not divide the sequence
    "mamba2": ("Mamba2Config", {"hidden_size": 64, "num_heads": 16, "head_dim": 8, "state_size": 12, "n_groups": 4,
                                "num_hidden_layers": 2, "vocab_size": 99, "chunk_size": 16, "conv_kernel": 3,
                                "time_step_limit": (0.02, 0.08)}),
}  # fmt: skip
SOME: dict[str, Any] = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 40, "kv_lora_rank": 20, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SOME, "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 3,
                                     "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**SOME, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 1}),
    "qwen3_moe, not normalised": ("Qwen3MoeConfig", {**SOME, "norm_topk_prob": False}),
    "deepseek_v3": ("DeepseekV3Config", {
        **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "q_lora_rank": 24, "v_head_dim": 12,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    # limits that are reached, a window shorter than the sequence, positions beyond those that YaRN keeps
    "gpt_oss": ("GptOssConfig", {**SIZES, "intermediate_size": 48, "head_dim": 24, "num_local_experts": 8,
                                 "num_experts_per_tok": 3, "swiglu_limit": 0.3, "sliding_window": 7,
                                 "rope_parameters": {**YARN, "truncate": False}}),
    "deepseek_v3, direct queries": ("DeepseekV3Config", {
        **LATENT, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "q_lora_rank": None, "v_head_dim": 32,
    }),
    "nemotron_h": ("NemotronHConfig", {
        **SIZES, "head_dim": 24, "hybrid_override_pattern": "ME*-M", "ssm_state_size": 12, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 4, "chunk_size": 16, "time_step_min": 0.02, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 2.5,
    }),
    # as many query groups as half of the ranks, two value heads for a key head, a chunk that ends within the sequence
    "qwen3_next": ("Qwen3NextConfig", {
        **SOME, "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 2, *["full_attention"] * 2],
        "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12,
        "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1, 3], "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 56,
    }),
}  # fmt: skip
MODELS = {**FAMILIES, **EXPERTS}


def hf_model(name: str, seed: int = 0):
    return a_model(*MODELS[name], seed)


def a_model(cls: str, fields: dict[str, Any], seed: int = 0, noise: float = 0.05) -> Any:
    """A random model of transformers whose norms are not 1 and biases not 0."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, cls)(**fields)
    formulas = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **formulas).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(noise * torch.randn_like(param))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    return model


def in_fp64_of(model: Any) -> Any:
    """The same model, whose class casts to fp64 where it would to fp32; frequencies of RoPE stay as they were."""
    model.config._experts_implementation = "eager"  # the only one of theirs in fp64
    kind = type(model)
    twin = getattr(in_fp64(kind.__module__.split(".")[-2]), kind.__name__)(model.config).eval().double()
    twin.load_state_dict(model.state_dict())
    of_twin = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        of_twin[name].copy_(buffer)
    return twin


class Theirs(NamedTuple):
    """A model of transformers, and what it says, for ranks that need not import transformers."""

    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    tokens: torch.Tensor
    logits: torch.Tensor

    @classmethod
    @functools.cache
    def of(cls, name: str, seed: int = 0, batch: int = 2) -> Theirs:
        model = hf_model(name, seed)
        tokens = torch.randint(0, 99, (batch, 40), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            return cls(model.config.to_dict(), model.state_dict(), tokens, model(tokens).logits)


def ours_from(theirs: Theirs, parallel: ParallelConfig | None = None) -> GPTModel:
    family, config = config_from_huggingface(theirs.config)
    ours = GPTModel(config, Mesh.build(parallel or ParallelConfig())).eval()
    load_logical(ours, state_from_huggingface(theirs.state, config, family))
    return ours


def logical_names(config: Any) -> set[str]:
    with torch.device("meta"):
        return {name for name, _ in logical_parameters(GPTModel(config, Mesh.serial()))}


def deviations(rank: int, world: int, theirs: Theirs, layouts: list[dict[str, Any]]) -> list[float]:
    """Of the logits in each layout."""
    with torch.no_grad():
        ours = (ours_from(theirs, ParallelConfig(**layout)).full_logits(theirs.tokens) for layout in layouts)
        return [(logits - theirs.logits).abs().max().item() for logits in ours]


def assert_equal(ranks: Any, world: int, theirs: Theirs, *layouts: dict[str, Any]) -> None:
    for found in ranks(world).run(deviations, theirs, list(layouts)):
        assert max(found) <= 1e-5, dict(zip(map(str, layouts), found, strict=True))


TP2 = {TP: 2, SP: True}
A2A = {CP: 2, "cp_comm_type": "a2a"}
DENSE: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{TP: 2}, TP2, {CP: 2}], 4: [{TP: 4}, {TP: 4, SP: True}]}
MIXED: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{EP: 2}, {**TP2, EP: 2, ETP: 1}, TP2],
    4: [{EP: 4}, {**TP2, EP: 2, ETP: 2}, {**TP2, EP: 4, ETP: 1}, {CP: 2, EP: 2}],
}


# How a family is cut, its serial twin says (`tests/parallel`); here those whose weights come apart in another way.
CUT = {
    1: {*MODELS},
    2: {"gpt2", "qwen2.5-tied-mqa", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"},
    4: {"qwen2.5-tied-mqa", "mixtral"},
}


@pytest.mark.parametrize(
    "name, world",
    mostly_thorough(itertools.product(MODELS, CUT), lambda case: case[0] in CUT[case[1]]),
)
def test_logits(ranks, name, world):
    layouts = list((MIXED if name in EXPERTS else DENSE)[world])
    if world == 2 and name in ("qwen2.5-tied-mqa", "mistral"):
        layouts.append(A2A)
    assert_equal(ranks, world, Theirs.of(name), *layouts)


def logits_through_a_pipeline(rank: int, world: int, theirs: Theirs) -> float | None:
    """The last stage's deviation; None on ranks that have no logits."""
    family, config = config_from_huggingface(theirs.config)
    ours = ModelChunks(config, Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
    load_logical(ours, state_from_huggingface(theirs.state, config, family), stage=True)
    tokens, want = theirs.tokens.view(3, 2, 40), theirs.logits.view(3, 2, 40, -1)
    logits: dict[int, torch.Tensor] = {}

    def forward_of(stage):
        def forward(i, inputs):
            out = stage(tokens[i], inputs=inputs)
            if stage.post_process:
                logits[i] = out.transpose(0, 1)[..., : config.vocab_size]
            return out

        return forward

    with torch.no_grad():
        schedule = ours.evaluation(3)
        chunks = enumerate(stage for _, stage in ours.eval().stages())
        run(schedule, [ModuleStage(forward_of(stage), stage, schedule, rank, c) for c, stage in chunks], ours.mail)
        return max(((logits[i] - want[i]).abs().max().item() for i in logits), default=None)


@pytest.mark.parametrize("name", mostly_thorough(FAMILIES, {"gpt2", "gemma3"}.__contains__))
def test_logits_through_a_pipeline(ranks, name):
    first, last = ranks(2).run(logits_through_a_pipeline, Theirs.of(name, batch=6))
    assert first is None and last <= 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "gpt_oss", "mamba2", "nemotron_h", "qwen3_next"])
def test_gradients_of_all_weights(name):
    """Of the mean loss."""
    tokens = torch.randint(0, 99, (2, 41), generator=torch.Generator().manual_seed(3))
    still = assert_same_in_fp64(hf_model(name), tokens[:, :-1], tokens[:, 1:])
    assert all(name.endswith("expert_bias") for name in still), f"what is not moved is not compared: {still}"


def assert_same_in_fp64(theirs: Any, tokens: torch.Tensor, labels: torch.Tensor) -> list[str]:
    """Logits, and the gradients of the mean loss; returns the weights whose gradient is 0 in both."""
    family, config = config_from_huggingface(theirs.config.to_dict())
    ours = GPTModel(config, Mesh.serial()).double()
    load_logical(ours, state_from_huggingface(theirs.state_dict(), config, family))
    theirs = in_fp64_of(theirs)
    wanted = theirs(tokens, use_cache=False).logits  # their cache needs a layer of attention
    with torch.no_grad():
        assert (ours.full_logits(tokens) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten()).backward()
    ours(tokens, labels=labels).mean().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in theirs.named_parameters()}
    grads |= {n: torch.zeros_like(t) for n, t in theirs.state_dict().items() if n.endswith("correction_bias")}
    want = state_from_huggingface({n: grad.float() for n, grad in grads.items()}, config, family)
    for n, p in logical_parameters(ours):
        got = torch.zeros_like(p) if p.grad is None else gather_logical(p.grad, layout_of(p), Mesh.serial())
        assert (got - want[n]).abs().max() <= 1e-6 * want[n].abs().max() + 1e-12, n
    return [n for n, grad in want.items() if not grad.any()]


def assert_there_and_back(keys: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Of a `config.json` and its weights in fp32: both are the same after a way through the family's names."""
    family, config = config_from_huggingface(keys)
    ours = state_from_huggingface(state, config, family)
    back = state_to_huggingface(ours, config, family)
    again = state_from_huggingface(back, config, family)
    assert again.keys() == ours.keys() and all(torch.equal(again[name], ours[name]) for name in ours)
    assert all(torch.equal(back[name], state[name]) for name in back.keys() & state.keys())
    trained = {name: tensor for name, tensor in back.items() if not name.endswith("correction_bias")}
    assert count_parameters(config) == sum(tensor.numel() for tensor in trained.values())
    assert config_from_huggingface(config_to_huggingface(config, family)[1]) == (family, config)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_delta_rule_is_both_of_theirs(form):
    """Outputs, the last state and gradients, over more than one of their chunks of 64 tokens."""
    of, s = delta_inputs(s=150), 150
    state = delta_state()
    theirs = getattr(in_fp64("qwen3_next"), f"torch_{form}_gated_delta_rule")
    want, last = theirs(
        *(t.transpose(0, 1) for t in of.values()), initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    got, after = DeltaRule(*of.values(), 48).outputs(state)
    assert len(got) == s and (got.transpose(0, 1) - want).abs().max() <= 1e-12 and (after - last).abs().max() <= 1e-12
    of["state"] = state
    found, wanted = (gradients(of, *both) for both in ((got, after), (want.transpose(0, 1), last)))
    for name in of:
        assert (found[name] - wanted[name]).abs().max() <= 1e-11 * wanted[name].abs().max(), name


ALONE = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h"])
def test_the_weight_of_a_lone_expert_is_not_divided_by_itself(name):
    """Where transformers divides it, it is 1 whatever the score, which is another model: refused."""
    import transformers

    cls, fields = MODELS[name]
    theirs = a_model(cls, {**fields, **ALONE, "norm_topk_prob": False})
    tokens = torch.randint(0, 99, (2, 25), generator=torch.Generator().manual_seed(0))
    assert_same_in_fp64(theirs, tokens[:, :-1], tokens[:, 1:])
    family, config = config_from_huggingface(theirs.config.to_dict())
    assert config_from_huggingface(config_to_huggingface(config)[1]) == (family, config)
    divided = getattr(transformers, cls)(**{**fields, **ALONE}).to_dict()
    with pytest.raises(ConfigError, match="norm_topk_prob=True with num_experts_per_tok=1"):
        config_from_huggingface(divided)


@pytest.mark.parametrize("change", [{"norm_topk_prob": False}, {"rms_norm_eps": 1e-5}, {"num_experts_per_tok": 3}])
def test_what_is_not_supported_of_deepseek_is_refused(change):
    with pytest.raises(ConfigError, match="not supported"):
        config_from_huggingface({**hf_model("deepseek_v3").config.to_dict(), **change})


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_of_a_model_in_memory_is_bit_exact(name):
    """Of experts under the names that files have; the folders themselves: `tests/checkpoint/test_convert`."""
    theirs = hf_model(name)
    family, config = config_from_huggingface(theirs.config.to_dict())
    ours = state_from_huggingface(theirs.state_dict(), config, family)
    back = state_to_huggingface(ours, config, family)
    again = state_from_huggingface(back, config, family)
    assert again.keys() == ours.keys() and all(torch.equal(again[k], ours[k]) for k in ours)
    state = theirs.state_dict()
    assert all(torch.equal(back[k], state[k]) for k in back.keys() & state.keys())
    if name in FAMILIES:
        tied = set() if config.untie_embeddings_and_output_weights else {"lm_head.weight"}
        assert set(back) == set(state) - tied
    assert count_parameters(config) == sum(p.numel() for p in theirs.parameters())


def test_tensors_that_their_class_leaves_out_are_left_out_here():
    """Published files of Qwen3-Next have weights of multi-token prediction; in another family they are refused."""
    for name in ("qwen3_next", "qwen3_moe"):
        theirs = hf_model(name)
        family, config = config_from_huggingface(theirs.config.to_dict())
        state = {**theirs.state_dict(), "mtp.fc.weight": torch.zeros(3, 3)}
        if name == "qwen3_next":
            assert state_from_huggingface(state, config, family).keys() == logical_names(config)
        else:
            with pytest.raises(CheckpointError, match=r"left over mtp\.fc\.weight"):
                state_from_huggingface(state, config, family)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {**YARN, "attention_factor": 1.5}},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(change):
    with pytest.raises(ConfigError, match="not supported"):
        config_from_huggingface({**hf_model("llama2").config.to_dict(), **change})
