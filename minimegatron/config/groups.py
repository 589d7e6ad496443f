"""Parameter groups in words: which parameters learn at another rate, decay otherwise, or not at all.

    --param-groups 'decoder.layers.*.mlp.*:lr_mult=0.1,wd_mult=0' 'output_layer.weight:wd_mult=0.5'
    --freeze 'embedding.*' 'decoder.layers.0.*'

A pattern is matched against logical names as a shell matches file names (`*`, `?`, `[0-3]`); logical names are the same
in every layout, so a pattern means the same parameters in every layout.

Here only the words are checked. What needs the model's names (a pattern that matches nothing, two that contradict each
other) is checked when the model is there, in `optim/groups`.

Megatron-LM: `ParamKey` and `ParamGroupOverride` of `megatron/core/optimizer`, which scripts fill in Python.
"""

from __future__ import annotations

import dataclasses

from minimegatron.errors import ConfigError, did_you_mean, require

MULTIPLIERS = ("lr_mult", "wd_mult")


@dataclasses.dataclass(frozen=True)
class GroupRule:
    """What one pattern sets.

    Attributes:
        pattern: of logical names.
        values: multiplier -> number.
    """

    pattern: str
    values: dict[str, float]


def parse_group(text: str) -> GroupRule:
    """`PATTERN:lr_mult=X,wd_mult=Y`, of which one multiplier may be left out.

    Raises:
        ConfigError: naming the word that is wrong.
    """
    pattern, colon, settings = text.rpartition(":")
    example = "for example 'decoder.layers.*.mlp.*:lr_mult=0.1,wd_mult=0'"
    require(bool(colon and pattern and settings), f"param_groups {text!r} is no PATTERN:NAME=NUMBER,...", example)
    values: dict[str, float] = {}
    for word in settings.split(","):
        name, equals, number = word.partition("=")
        known = did_you_mean(name, MULTIPLIERS) or f"choose among {', '.join(MULTIPLIERS)}"
        require(name in MULTIPLIERS, f"param_groups {text!r} sets {name!r}", known)
        require(bool(equals) and name not in values, f"param_groups {text!r}: {word!r}", example)
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigError(f"param_groups {text!r}: {number!r} is no number", fix=example) from None
        require(
            0 <= values[name] < float("inf"), f"param_groups {text!r}: {name} is {number}", "0 or a positive number"
        )
    return GroupRule(pattern, values)
