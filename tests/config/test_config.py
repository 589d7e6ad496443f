"""The rules of config: refused early, with the values, the rule and the fix; or it works."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minimegatron.comm.mesh import AXES, Axis, Mesh, check_grids_agree, rank_groups
from minimegatron.config import (
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    TransformerConfig,
)
from minimegatron.config.fields import MODEL, elsewhere, free, opt
from minimegatron.config.fits import check_model_fits
from minimegatron.config.run import KINDS, OF_TASKS, SECTIONS
from minimegatron.errors import ConfigError
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.decoder import GPTModel

CLASSES = (TransformerConfig, ParallelConfig, OptimizerConfig, DataConfig, TrainingConfig, CheckpointConfig)
FIELDS = [(cls, field.name) for cls in CLASSES for field in dataclasses.fields(cls)]


def test_a_field_says_what_it_is_to_a_run_that_goes_on():
    for kind in (2, "model", None):
        with pytest.raises(TypeError, match="the field 'layers' has no kind: begin with MODEL"):
            opt(kind, 2, "layers")
    for kind in (free(""), elsewhere(""), dataclasses.replace(MODEL, why="some")):
        with pytest.raises(TypeError, match="have a reason"):
            opt(kind, 2, "layers")
    names = [name for _, name in FIELDS]
    assert sorted(KINDS) == sorted([*names, *OF_TASKS, "task_name"]), "two fields of a run have one name"
    assert TransformerConfig.names_of(MODEL) >= {"num_layers", "kv_lora_rank", "num_experts"}
    assert not TransformerConfig.names_of(MODEL) & {"params_dtype", "kernels", "hidden_dropout", "fp8_format"}


# ------------------------------------------------------------------------------------------------ misspelt names


@st.composite
def typos(draw):
    """(class, field, the field's name with one letter dropped, doubled, or two neighbours swapped)."""
    cls, name = draw(st.sampled_from([(c, n) for c, n in FIELDS if len(n) >= 5]))
    at = draw(st.integers(0, len(name) - 2))
    swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    typo = draw(st.sampled_from([name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], swapped]))
    assume(typo not in {f.name for f in dataclasses.fields(cls)})
    return cls, name, typo


@given(typos())
@settings(max_examples=150, deadline=None)
def test_a_misspelt_field_is_refused_with_the_nearest(case):
    cls, name, typo = case
    with pytest.raises(ConfigError) as caught:
        cls.from_dict({typo: 1})
    assert caught.value.exit_code == 2
    assert f"{cls.__name__} has no field `{typo}`" in caught.value.what
    assert "did you mean `" in caught.value.fix
    if len(name) >= 12:
        assert f"`{name}`" in caught.value.fix


def test_a_name_with_nothing_near_lists_the_fields():
    with pytest.raises(ConfigError) as caught:
        ParallelConfig.from_dict({"zzz": 1})
    assert "tensor_model_parallel_size" in caught.value.fix


# ----------------------------------------------------------------------------- what a plain dataclass would accept


@pytest.mark.parametrize(
    ("cls", "values", "says"),
    [
        (TransformerConfig, {"num_layers": "2"}, "num_layers='2' is a str"),
        (TransformerConfig, {"num_layers": True}, "num_layers=True is a bool"),
        (TransformerConfig, {"num_layers": 2.0}, "num_layers=2.0 is a float"),
        (TransformerConfig, {"num_layers": None}, "num_layers=None"),
        (TransformerConfig, {"qk_layernorm": 1}, "qk_layernorm=1 is a int"),
        (TransformerConfig, {"layernorm_epsilon": math.nan}, "layernorm_epsilon=nan"),
        (TransformerConfig, {"normalization": "RMSnorm"}, "did you mean `RMSNorm`"),
        (TransformerConfig, {"activation": "tanh"}, "is not one of"),
        (TransformerConfig, {"num_layers": 0}, "num_layers is 0"),
        (TransformerConfig, {"hidden_size": 65}, "does not divide hidden_size"),
        (TransformerConfig, {"num_query_groups": 3}, "num_query_groups (3) does not divide num_attention_heads (4)"),
        (TransformerConfig, {"num_query_groups": 0}, "num_query_groups (0)"),
        (TransformerConfig, {"hidden_dropout": 1.0}, "hidden_dropout is 1.0"),
        (TransformerConfig, {"sliding_window": 0}, "sliding_window is 0"),
        (TransformerConfig, {"window_attn_skip_freq": "2"}, "without a window"),
        (TransformerConfig, {"sliding_window": 4, "window_attn_skip_freq": "1"}, "gives no layer a window"),
        (TransformerConfig, {"sliding_window": 4, "window_attn_skip_freq": "[1,0,1]"}, "says 3 layers"),
        (TransformerConfig, {"attn_logit_softcapping": 5.0, "attention_backend": "sdpa"}, "attention_backend=auto"),
        (TransformerConfig, {"qk_layernorm_over_heads": True}, "qk_layernorm=True and normalization=RMSNorm"),
        (TransformerConfig, {"layernorm_placement": "output", "fp32_residual_connection": True}, "no norm rounds"),
        (
            TransformerConfig,
            {"multi_latent_attention": True, "position_embedding_type": "rope", "add_bias_linear": False}
            | {"softmax_scale": 0.1},
            "drop softmax_scale",
        ),
        (TransformerConfig, {"recompute_modules": ("mpl",)}, "mpl"),
        (TransformerConfig, {"position_embedding_type": "rope", "kv_channels": 3}, "RoPE rotates 3"),
        (ParallelConfig, {"tensor_model_parallel_size": 0}, "tensor_model_parallel_size is 0"),
        (ParallelConfig, {"sequence_parallel": True}, "sequence_parallel needs"),
        (ParallelConfig, {"order": "tp-dp"}, "order='tp-dp'"),
        (ParallelConfig, {"order": "tp-cp-ep-dp-pp-xp"}, "order="),
        (ParallelConfig, {"order": "tp-tp-cp-ep-dp-pp"}, "order="),
        (OptimizerConfig, {"lr": 1e-4, "min_lr": 1e-3}, "min_lr=0.001"),
        (OptimizerConfig, {"clip_grad": -1.0}, "clip_grad is -1.0"),
        (OptimizerConfig, {"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "give one of them"),
        (OptimizerConfig, {"lr_warmup_iters": 3, "lr_warmup_fraction": 0.0}, "give one of them"),
        (OptimizerConfig, {"lr_decay_style": "WSD"}, "lr_wsd_decay_iters"),
        (OptimizerConfig, {"optimizer": "adamw"}, "did you mean `adam`"),
        (DataConfig, {"seq_length": 0}, "seq_length is 0"),
        (DataConfig, {"mock_data": True, "data_path": ("a",)}, "data_path and mock_data are given"),
        (DataConfig, {"data_path": "a"}, "data_path='a' is a str"),
        (TrainingConfig, {"micro_batch_size": 0}, "micro_batch_size is 0"),
        (TrainingConfig, {"rampup_batch_size": (1, 2)}, "start, increment, samples"),
        (TrainingConfig, {"distributed_backend": "ncll"}, "did you mean `nccl`"),
    ],
)
def test_an_illegal_value_is_refused_with_the_value_and_a_fix(cls, values, says):
    with pytest.raises(ConfigError) as caught:
        cls(**values)
    assert says in str(caught.value) and caught.value.fix


# Any number will do, or other rules say which.
UNBOUNDED = {"seed", "lr", "lr_warmup_fraction", "num_query_groups", "profile_step_end", "moe_aux_loss_coeff"}


def test_every_number_has_a_bound_below_which_it_is_refused():
    """0 microbatches, a negative decay: most would end in a crash far away, some in a run that does nothing."""
    checked = 0
    for cls, name in FIELDS:
        field = cls.__dataclass_fields__[name]
        kinds = str(field.type)
        if name in UNBOUNDED or "tuple" in kinds or not ("int" in kinds or "float" in kinds):
            continue
        bounds = {key: field.metadata[key] for key in ("least", "above", "below") if field.metadata[key] is not None}
        assert {"least", "above"} & bounds.keys(), f"{name} has no lower bound"
        outside = [bounds["least"] - (1 if "int" in kinds else 1e-3)] if "least" in bounds else [bounds["above"]]
        for value in outside + ([bounds["below"]] if "below" in bounds else []):
            with pytest.raises(ConfigError, match=rf"(?s){name} is {value}.*must be"):
                cls(**{name: value})
            checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    ("cls", "values", "says"),
    [
        (ParallelConfig, {"ddp_bucket_size": 1000}, "without overlap_grad_reduce"),
        (TransformerConfig, {"position_embedding_type": "rope", "rotary_percent": 2.0}, "rotary_percent is 2.0"),
        (
            TransformerConfig,
            {"position_embedding_type": "rope", "rope_scaling_type": "llama3", "rope_scaling_low_freq_factor": 4.0},
            "choose rope_scaling_low_freq_factor < rope_scaling_high_freq_factor",
        ),
        (
            TransformerConfig,
            {"position_embedding_type": "rope", "rope_scaling_type": "yarn", "yarn_beta_fast": 0.5},
            "choose yarn_beta_slow < yarn_beta_fast",
        ),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(cls, values, says):
    with pytest.raises(ConfigError, match=says):
        cls(**values)


def test_an_int_is_a_legal_float_and_nothing_else_changes():
    assert OptimizerConfig(lr=1).lr == 1


def test_what_is_left_out_is_derived():
    c = TransformerConfig(hidden_size=96, num_attention_heads=6)
    assert (c.kv_channels, c.num_query_groups, c.ffn_hidden_size, c.queries_per_group) == (16, 6, 384, 1)
    gated = TransformerConfig(hidden_size=96, num_attention_heads=6, activation="swiglu")
    assert gated.ffn_hidden_size == 256, "4 * 96 * 2/3 is a multiple of 64"
    assert ParallelConfig(tensor_model_parallel_size=4).expert_tensor_parallel_size == 4


def test_configs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TransformerConfig().num_layers = 3


@given(st.integers(1, 200_000), st.sampled_from([1, 64, 128]), st.sampled_from([1, 2, 4, 8]))
def test_the_padded_vocabulary_is_the_smallest_that_fits(vocab, multiple, tp):
    padded = TransformerConfig(vocab_size=vocab, make_vocab_size_divisible_by=multiple).padded_vocab_size(tp)
    assert padded % (multiple * tp) == 0 and vocab <= padded < vocab + multiple * tp


# --------------------------------------------------------------------------------------------------- any layout

sizes = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8])
layouts = st.fixed_dictionaries(
    {
        "tensor_model_parallel_size": sizes,
        "pipeline_model_parallel_size": sizes,
        "context_parallel_size": sizes,
        "expert_model_parallel_size": sizes,
        "expert_tensor_parallel_size": st.one_of(st.none(), sizes),
        "sequence_parallel": st.booleans(),
        "order": st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
    }
)


@given(layouts, st.integers(0, 64), st.booleans())
@settings(max_examples=250, deadline=None)
def test_a_layout_is_refused_at_once_or_every_rank_has_its_place(values, world, whole):
    if whole:  # a world that the dense layout divides, so that more than luck is tested
        world = values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"] * (world % 4 + 1)
        world *= values["context_parallel_size"]
    try:
        parallel = ParallelConfig(**values)
        dp = parallel.data_parallel_size(world)
        check_grids_agree(parallel, world)
    except ConfigError as error:
        assert error.fix and any(character.isdigit() for character in error.what + error.fix) or "order" in error.what
        return
    tp, pp, cp = (values[f"{n}_parallel_size"] for n in ("tensor_model", "pipeline_model", "context"))
    assert dp * tp * pp * cp == world
    for grid, axes in AXES.values():
        groups = rank_groups(parallel, world, axes, grid)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert len({len(group) for group in groups}) == 1
    for a, b in (("tp", "cp-dp-pp"), ("cp", "tp-dp-pp"), ("dp", "tp-cp-pp"), ("pp", "tp-cp-dp")):
        for one in rank_groups(parallel, world, a):
            for other in rank_groups(parallel, world, b):
                assert len(set(one) & set(other)) == 1, f"{a} and {b} are the rows and columns of one table"


def rank_of_tp(parallel: ParallelConfig, rank: int) -> Mesh:
    """The mesh of one rank of a tp group, without any process: nothing can travel on it, but a model can be built."""
    size = parallel.tensor_model_parallel_size
    axes = {name: Axis(name, (rank,), 0) for name in [*AXES, "embd"]}
    axes["tp"] = Axis("tp", tuple(range(size)), rank)
    return Mesh(parallel, rank, torch.device("cpu"), axes)


models = st.fixed_dictionaries(
    {
        "num_layers": st.sampled_from([1, 2, 4]),
        "hidden_size": st.sampled_from([10, 24, 48]),
        "num_attention_heads": st.sampled_from([1, 2, 3, 4, 6, 8]),
        "num_query_groups": st.sampled_from([None, None, 1, 2, 3]),
        "kv_channels": st.sampled_from([None, 2, 4]),
        "ffn_hidden_size": st.sampled_from([None, None, 10, 24]),
        "vocab_size": st.integers(1, 300),
        "activation": st.sampled_from(["gelu", "swiglu"]),
        "position_embedding_type": st.sampled_from(["learned_absolute", "rope", "none"]),
        "untie_embeddings_and_output_weights": st.booleans(),
        "qk_layernorm": st.booleans(),
    }
)


@given(models, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 1, 2]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_model_that_passes_the_check_is_built_and_its_parts_tile_every_weight(values, tp, pp, sequence_parallel):
    try:
        config = TransformerConfig(**values)
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sequence_parallel
        )
        check_model_fits(config, parallel, seq_length=64)
    except ConfigError as error:
        assert error.fix
        return
    with torch.device("meta"):
        parts = [dict(logical_parameters(GPTModel(config, rank_of_tp(parallel, rank)))) for rank in range(tp)]
    for name, first in parts[0].items():
        layout = layout_of(first)
        held = sum(rank[name].numel() for rank in parts)
        assert held == math.prod(layout.shape) * (1 if layout.sharded or tp == 1 else tp), name


@pytest.mark.parametrize(
    ("model", "parallel", "seq_length", "says"),
    [
        ({"num_attention_heads": 6, "hidden_size": 96}, {"tensor_model_parallel_size": 4}, None, "1, 2, 3, 6"),
        ({"ffn_hidden_size": 10}, {"tensor_model_parallel_size": 4}, None, "ffn_hidden_size (10)"),
        (
            {"num_attention_heads": 12, "hidden_size": 96, "num_query_groups": 3},
            {"tensor_model_parallel_size": 2},
            None,
            "num_query_groups (3) and tensor_model_parallel_size (2)",
        ),
        ({"num_layers": 3}, {"pipeline_model_parallel_size": 2}, None, "num_layers (3)"),
        ({}, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, 30, "seq_length (30)"),
        ({}, {"context_parallel_size": 2}, 30, "2*cp"),
        ({"max_position_embeddings": 16}, {}, 17, "max_position_embeddings (16)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_values_that_would(model, parallel, seq_length, says):
    with pytest.raises(ConfigError) as caught:
        check_model_fits(TransformerConfig(**model), ParallelConfig(**parallel), seq_length)
    assert says in str(caught.value) and caught.value.fix


# ------------------------------------------------------------------------------------------------- there and back

CHANGED = (
    TransformerConfig(num_layers=3, num_query_groups=2, activation="swiglu", recompute_modules=("mlp", "core_attn")),
    ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True, order="tp-cp-ep-pp-dp"),
    OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_decay_style="cosine", loss_scale=128.0),
    DataConfig(data_path=("0.5", "a", "0.5", "b"), seq_length=512),
    TrainingConfig(global_batch_size=32, rampup_batch_size=(8, 8, 1000), eval_interval=10),
)


@pytest.mark.parametrize("config", [*(cls() for cls in CLASSES), *CHANGED], ids=lambda c: type(c).__name__)
def test_json_and_back_is_the_same(config):
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.replace() == config


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_every_field_explains_itself(cls, name):
    field = cls.__dataclass_fields__[name]
    assert len(field.metadata["help"]) >= 8
    if field.metadata["choices"]:
        defaults = field.default if isinstance(field.default, tuple) else (field.default,)
        assert field.default is None or set(defaults) <= set(field.metadata["choices"])


# --------------------------------------------------------------------------------------------------- a cheap import


def test_importing_the_package_costs_and_changes_nothing():
    script = """
import os, sys, threading
class Watched(dict):
    reads = []
    def __getitem__(self, key): self.reads.append(key); return super().__getitem__(key)
    def get(self, key, *d): self.reads.append(key); return super().get(key, *d)
os.environ = Watched(os.environ)
before = set(os.listdir("."))
import minimegatron, minimegatron.errors, minimegatron.trace, minimegatron.cli
heavy = {"torch", "numpy", "matplotlib", "transformers"} & set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1 and set(os.listdir(".")) == before and not Watched.reads, Watched.reads
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_config_itself_starts_no_cuda():
    script = "import minimegatron.config, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_all_configs_are_tested_here():
    assert set(SECTIONS.values()) == set(CLASSES)


@pytest.mark.parametrize("vocab, by, tp, padded", [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (128, 128, 1, 128)])
def test_vocabulary_is_padded_to_split_evenly(vocab, by, tp, padded):
    config = TransformerConfig(vocab_size=vocab, make_vocab_size_divisible_by=by)
    assert config.padded_vocab_size(tp) == padded
