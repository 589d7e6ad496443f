"""Rates and frozen parameters by name: the groups, the refusals, and every layout with something frozen."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.param import logical_parameters
from minimegatron.models.decoder import GPTModel
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.groups import check_patterns, freeze
from minimegatron.optim.schedule import OptimizerParamScheduler, Schedule
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.axes import EP, PP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case, weights

NAMES = sorted(weights(Case(model={"qk_layernorm": True}).config, 0))


def groups_of(**fields: Any) -> list[dict[str, Any]]:
    """Of a small model, with names in place of parameters; those with parameters."""
    model, config = GPTModel(Case(model={"qk_layernorm": True}).config, Mesh.serial()), OptimizerConfig(**fields)
    freeze(model, config, Mesh.serial())
    optimizer = build_optimizer(config, model, Mesh.serial())
    names = {p.data_ptr(): name for name, p in logical_parameters(model)}
    named = [{**g, "params": {names[p.data_ptr()] for p in g["params"]}} for g in optimizer.param_groups]
    return [group for group in named if group["params"]]


def test_rates_by_name() -> None:
    rules = ("decoder.layers.0.mlp.*:lr_mult=0.5,wd_mult=2", "*layernorm.weight:lr_mult=0.1", "output*:wd_mult=0")
    settings = {"lr": 1.0, "min_lr": 0.2, "decoupled_lr": 4.0, "decoupled_min_lr": 0.5, "weight_decay": 0.1}
    groups = groups_of(**settings, apply_wd_to_qk_layernorm=True, param_groups=rules)
    found = {name: group for group in groups for name in group["params"]}
    assert found.keys() == set(NAMES) and sum(len(g["params"]) for g in groups) == len(NAMES)
    scheduler = OptimizerParamScheduler(
        groups, Schedule(max_lr=1.0, min_lr=0.2, lr_decay_steps=10, start_wd=0.1, end_wd=0.1)
    )
    rates = {}
    for step in (0, 10):
        rates[step] = {n: (round(g["lr"], 9), round(g["weight_decay"], 9)) for n, g in found.items()}
        scheduler.step(10)
    assert rates[0]["decoder.layers.0.mlp.linear_fc1.weight"] == (0.5, 0.2)
    assert rates[10]["decoder.layers.0.mlp.linear_fc1.weight"] == (0.1, 0.2)
    assert rates[0]["decoder.layers.1.mlp.linear_fc1.weight"] == (1.0, 0.1)
    assert rates[0]["decoder.layers.1.self_attention.q_layernorm.weight"] == (0.1, 0.1)
    assert rates[0]["decoder.layers.1.input_layernorm.weight"] == (0.1, 0.0)
    assert rates[0]["embedding.word_embeddings.weight"] == (4.0, 0.1)
    assert rates[10]["output_layer.weight"] == (0.5, 0.0) and rates[0]["output_layer.weight"] == (4.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"freeze": ("decoder.layer.*",)}, r"freeze: no parameter's name matches 'decoder\.layer\.\*'"),
        ({"freeze": ("output_layer.weights",)}, "did you mean `output_layer.weight`"),
        ({"param_groups": ("*bias:lr_mult=2",)}, r"param_groups: no parameter's name matches '\*bias'"),
        ({"freeze": ("*",)}, "nothing is left to train"),
        (
            {"freeze": ("output*",), "param_groups": ("output*:lr_mult=2",)},
            "all that it matches is frozen by freeze out",
        ),
        (
            {"param_groups": ("*fc1*:lr_mult=2", "decoder.layers.1.*:lr_mult=3")},
            r"'decoder.layers.1.mlp.linear_fc1.weight' has lr_mult=2 by '\*fc1\*' and lr_mult=3 by 'decoder.layers.1",
        ),
    ],
)
def test_patterns_without_meaning_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_patterns(OptimizerConfig(**fields), NAMES)


def test_patterns_that_agree_or_say_different_things_are_accepted() -> None:
    check_patterns(OptimizerConfig(param_groups=("*fc1*:lr_mult=2", "*layers.1.*:lr_mult=2,wd_mult=0")), NAMES[::-1])
    broad = OptimizerConfig(freeze=("decoder.layers.0.*",), param_groups=("decoder.*:lr_mult=2",))
    check_patterns(broad, NAMES)


@pytest.mark.parametrize("text", ["*", "*:", ":lr_mult=1", "*:lr=1", "*:lr_mult", "*:lr_mult=x", "*:lr_mult=-1"])
def test_words_that_set_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="param_groups"):
        OptimizerConfig(param_groups=(text,))
    with pytest.raises(ConfigError, match="decoupled_min_lr without"):
        OptimizerConfig(decoupled_min_lr=0.1)


FROZEN = ("embedding.*", "decoder.layers.0.*", "*.1.self_attention.linear_qkv.*", "*weight2")


CASES = list(
    itertools.product(
        ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2"), ({}, {TP: 2}, {PP: 2}, {EP: 2})
    )
)


@pytest.mark.parametrize(("sharding", "layout"), mostly_thorough(CASES, [1, 11, 16]), ids=str)
def test_gradients_of_the_rest_are_those_of_one_process(
    assert_same_as_serial: Any, layout: dict[str, Any], sharding: str
) -> None:
    model: dict[str, Any] = {"num_layers": 4}
    model |= {"family": "mixtral", "num_experts": 4, "moe_router_topk": 2} if EP in layout else {}
    frozen = FROZEN if EP in layout else FROZEN[:3]
    case = Case(layout, model, accumulation=2, sharding=sharding, double=True, freeze=frozen)
    assert_same_as_serial(case, dp=2)


@pytest.mark.parametrize(
    "frozen, sharding", [(("embedding.*",), "optim_grads_params"), (("decoder.layers.3.*", "*fc1*"), "no_shard")]
)
def test_tied_embeddings_and_a_wgrad_put_off(
    assert_same_as_serial: Any, frozen: tuple[str, ...], sharding: str
) -> None:
    layout = {PP: 2, "pipeline_schedule": "zb_h1"}
    model = {"num_layers": 4, "untie_embeddings_and_output_weights": False}
    assert_same_as_serial(Case(layout, model, accumulation=4, sharding=sharding, double=True, freeze=frozen), dp=2)


def run_of(words: str) -> RunConfig:
    small = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    return parse_args(shlex.split(f"{small} --mock-data --train-iters 1 {words}"))


def test_a_flag_that_is_given_twice_adds_its_words() -> None:
    given = run_of("--freeze a* b* --freeze c* --param-groups d*:lr_mult=2 --decoupled-lr 0.5").optimizer
    assert given.freeze == ("a*", "b*", "c*") and given.param_groups == ("d*:lr_mult=2",) and given.decoupled_lr == 0.5


def test_a_run_trains_what_is_not_frozen() -> None:
    trainer = build_trainer(run_of("--lr 0.1 --freeze embedding.* *layers.0.* --check-first-step"), quiet=True)
    before = {name: p.detach().clone() for name, p in logical_parameters(trainer.model)}
    trainer.train()
    moved = {name for name, p in logical_parameters(trainer.model) if not torch.equal(p, before[name])}
    assert moved == {name for name in before if not name.startswith("embedding") and "layers.0." not in name}
    with pytest.raises(ConfigError, match="no parameter's name"):
        build_trainer(run_of("--freeze nothing"), quiet=True)


def test_a_frozen_parameter_takes_no_memory_beside_its_own() -> None:
    from minimegatron.parallel.data.ddp import DistributedDataParallel

    sizes = {}
    for frozen in ((), ("*fc1*",)):
        model = GPTModel(Case().config, Mesh.serial())
        freeze(model, OptimizerConfig(freeze=frozen), Mesh.serial())
        ddp = DistributedDataParallel(model, Mesh.serial(), sharding="optim")
        optimizer = build_optimizer(OptimizerConfig(), ddp, Mesh.serial(), ddp.shards())
        sizes[frozen] = ddp.grad_buffers[0].data.numel(), sum(t.numel() for t in optimizer.held()["moments"])
    fc1 = 2 * 96 * 32
    assert sizes[()][0] - sizes[("*fc1*",)][0] == fc1 and sizes[()][1] - sizes[("*fc1*",)][1] == 2 * fc1
