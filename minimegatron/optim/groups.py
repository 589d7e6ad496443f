"""Parameter groups: learning rate and weight decay of a parameter by its logical name; frozen parameters.

The problem in a sentence: biases and norms must not decay, embeddings may want a learning rate of their own, and of a
model that is adapted to a new task most parameters are frozen.

| what                         | for                             | becomes                            |
|------------------------------|---------------------------------|------------------------------------|
| no weight decay              | biases and 1-D parameters       | `wd_mult` 0                        |
| `apply_wd_to_qk_layernorm`   | the norms of queries and keys   | `wd_mult` 1                        |
| `decoupled_lr`, `..._min_lr` | word embedding and output layer | `max_lr`, `min_lr` of the schedule |
| `param_groups`               | what a pattern matches          | `lr_mult`, `wd_mult`               |
| `freeze`                     | what a pattern matches          | `requires_grad` is off             |

A group of torch's optimizer holds the parameters with equal numbers; the scheduler writes rates into it at every step:

    lr = lr_mult * schedule(max_lr, min_lr)         weight decay = wd_mult * schedule of weight decay

A frozen parameter has no gradient, no place in the gradient buffer, no main parameter and no moments. Layers below it
still learn: gradients pass through it.

Megatron-LM: `_get_param_groups` in `megatron/core/optimizer/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from fnmatch import fnmatchcase

from torch import nn

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.config.optimizer import MULTIPLIERS, GroupRule, parse_group
from minimegatron.errors import ConfigError, did_you_mean, require
from minimegatron.layers.param import ParamLayout, layout_of, logical_parameters

INPUT_AND_OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")
QK_NORMS = ("q_layernorm.", "k_layernorm.")


@dataclasses.dataclass(frozen=True)
class Rates:
    """The settings that the parameters of a group share.

    Attributes:
        wd_mult, lr_mult: factors of the scheduled weight decay and learning rate.
        max_lr, min_lr: peak and floor of the schedule; None for those of the run.
        matrix: whether Muon updates them.
    """

    wd_mult: float = 1.0
    lr_mult: float = 1.0
    max_lr: float | None = None
    min_lr: float | None = None
    matrix: bool = False

    def group(self, config: OptimizerConfig) -> dict[str, object]:
        """A group of torch's optimizer, without its parameters; settings that differ from the run's are named."""
        lr = config.lr if self.max_lr is None else self.max_lr
        named = {"lr_mult": self.lr_mult} if self.lr_mult != 1.0 else {}
        named |= {name: value for name in ("max_lr", "min_lr") if (value := getattr(self, name)) is not None}
        return {
            "lr": lr * self.lr_mult,
            "weight_decay": config.weight_decay * self.wd_mult,
            "wd_mult": self.wd_mult,
            **named,
        }


def rates_of(name: str, layout: ParamLayout, config: OptimizerConfig) -> Rates:
    """The rates of one parameter."""
    dims = len(layout.shape) - (layout.experts is not None)  # of one expert
    decays = dims > 1 and not name.endswith(".bias")
    decays = decays or (config.apply_wd_to_qk_layernorm and any(norm in name for norm in QK_NORMS))
    values = {"wd_mult": 1.0 if decays else 0.0}
    if name in INPUT_AND_OUTPUT and config.decoupled_lr is not None:
        values["max_lr"] = config.decoupled_lr
        if config.decoupled_min_lr is not None:
            values["min_lr"] = config.decoupled_min_lr
    for rule in map(parse_group, config.param_groups):
        if fnmatchcase(name, rule.pattern):
            values |= rule.values
    is_matrix = dims == 2 and name not in INPUT_AND_OUTPUT
    return Rates(**values, matrix=config.has_matrices and is_matrix)


def freeze(model: nn.Module, config: OptimizerConfig, mesh: Mesh) -> None:
    """Turn gradients off for the parameters of `config.freeze`; call before the model is wrapped, on all ranks.

    Raises:
        ConfigError: on all ranks; a pattern matches nothing in the whole model, everything is frozen, or two patterns
            contradict each other.
    """
    if not (config.freeze or config.param_groups):
        return
    params = [(name, param) for name, param in logical_parameters(model) if param.requires_grad]
    names_by_rank = gather_objects(sorted({name for name, _ in params}), mesh.world)
    check_patterns(config, {name for names in names_by_rank for name in names})
    for name, param in params:
        if frozen(name, config):
            param.requires_grad_(False)


def train_added(model: nn.Module) -> None:
    """Turn gradients off for all parameters but adapters and heads that were added (`ParamLayout.added`)."""
    for _, param in logical_parameters(model):
        if not layout_of(param).added:
            param.requires_grad_(False)


def frozen(name: str, config: OptimizerConfig) -> bool:
    """Whether `config.freeze` names this parameter."""
    return _matches(name, config.freeze)


def check_patterns(config: OptimizerConfig, names: Collection[str]) -> None:
    """Refuse patterns that match no parameter of the whole model, or that contradict each other.

    Raises:
        ConfigError: naming the patterns, and the parameter.
    """
    rules = [parse_group(text) for text in config.param_groups]
    trained = [name for name in sorted(names) if not _matches(name, config.freeze)]
    for flag, patterns in (("freeze", config.freeze), ("param_groups", [rule.pattern for rule in rules])):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                fix = did_you_mean(pattern, names) or f"names are like {min(names)!r} and {max(names)!r}"
                raise ConfigError(f"{flag}: no parameter's name matches {pattern!r}", fix=fix)
    require(
        bool(trained), "freeze matches every parameter: nothing is left to train", "narrow the patterns of --freeze"
    )
    for rule in rules:
        require(
            any(fnmatchcase(name, rule.pattern) for name in trained),
            f"param_groups {rule.pattern!r}: all that it matches is frozen by freeze {' '.join(config.freeze)}",
            "drop one of the two",
        )
    for name in trained:
        matching = [rule for rule in rules if fnmatchcase(name, rule.pattern)]
        for setting in MULTIPLIERS:
            _refuse_two(name, setting, [rule for rule in matching if setting in rule.values])


def _refuse_two(name: str, setting: str, rules: list[GroupRule]) -> None:
    for other in rules[1:]:
        require(
            other.values[setting] == rules[0].values[setting],
            f"param_groups: {name!r} has {setting}={rules[0].values[setting]:g} by {rules[0].pattern!r} and "
            f"{setting}={other.values[setting]:g} by {other.pattern!r}",
            "narrow one of the two patterns",
        )


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
