"""The families of models, one file each: sizes, Hugging Face's configuration and Hugging Face's tensors.

A *family* is what all its members share: norm, activation, positions, biases. A *preset* is a family and its sizes.
`--preset llama3-8b` on the command line starts from a preset; any other flag changes one of its fields.

To add a family, copy the nearest file of this folder and change it: whatever the folder holds is known to `--preset`,
`convert`, `--load` and every export. `family.py` says what a family is made of, `keys.py` how a `config.json` is read
without missing anything, `llama_like.py` what the descendants of Llama share. A family of another kind names the class
of its stages (`model_class`), and its vision encoder (`config/vision.Tower`). A family of another package is registered
where its module is imported; every command imports what an installed package names as an entry point:

    [project.entry-points."minimegatron.families"]
    mine = "my_package.my_family"

Sources of the sizes: the model cards and `config.json` files published with the weights.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.models.families.family import FAMILIES, PRESETS, Family

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")  # which registers its family
for _entry in entry_points(group="minimegatron.families"):
    _entry.load()


def preset(name: str) -> dict[str, Any]:
    """The fields of `TransformerConfig` that a preset sets.

    Raises:
        ConfigError: there is none with this name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}", fix=did_you_mean(name, PRESETS) or f"choose among {', '.join(PRESETS)}"
        )
    family = PRESETS[name]
    return {**family.fields, **family.presets[name]}


def family_named(name: str) -> Family:
    """The family with this `model_type`.

    Raises:
        ConfigError: there is none.
    """
    if name not in FAMILIES:
        raise ConfigError(
            f"there is no family {name!r}", fix=did_you_mean(name, FAMILIES) or f"choose among {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_config(family: str, **sizes: Any) -> TransformerConfig:
    """A `TransformerConfig` of a family with these sizes.

    Raises:
        ConfigError: unknown family, or the sizes do not make a model.
    """
    return TransformerConfig.from_dict({**family_named(family).fields, **sizes})
