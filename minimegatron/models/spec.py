"""A layer as data: which class is used for which part, to be built later.

The problem in a sentence: swapping one norm, one attention or the whole layer should not need a new model class.

A `ModuleSpec` names a class, fixed keyword arguments, and the specs of its submodules. `build_module(spec, ...)` calls
the class with both. The default layer is `decoder_layer_spec()` in `models/gpt_layer_specs.py`; a variant is a copy of
it with one entry changed, from Python (`GPTModel(config, mesh, spec=my_spec)`) or by `--spec my_module my_function`.
A spec may also name a whole stage, i.e. another model than `GPTModel` (`models/chunks.build_stage`).

Megatron-LM: `megatron/core/transformer/spec_utils.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from minimegatron.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from minimegatron.config.model import TransformerConfig


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """A module to be built.

    Attributes:
        module: the class, or any callable that returns a module.
        params: fixed keyword arguments.
        submodules: name -> spec, passed as the keyword argument `submodules` when there are any.
    """

    module: Callable[..., nn.Module]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    submodules: dict[str, ModuleSpec] = dataclasses.field(default_factory=dict)

    def with_submodule(self, name: str, spec: ModuleSpec) -> ModuleSpec:
        """A copy with one submodule replaced.

        Raises:
            ConfigError: there is no submodule with this name.
        """
        if name not in self.submodules:
            fix = did_you_mean(name, self.submodules) or f"choose among {', '.join(self.submodules)}"
            raise ConfigError(f"the spec has no submodule {name!r}", fix=fix)
        return dataclasses.replace(self, submodules={**self.submodules, name: spec})


def build_module(spec: ModuleSpec, *args: Any, **kwargs: Any) -> nn.Module:
    """Construct the module of the spec.

    Raises:
        ConfigError: the class does not take these arguments.
    """
    keywords = {**spec.params, **kwargs, **({"submodules": spec.submodules} if spec.submodules else {})}
    try:
        return spec.module(*args, **keywords)
    except TypeError as error:
        name = getattr(spec.module, "__qualname__", repr(spec.module))
        raise ConfigError(
            f"building {name} from its spec failed: {error}",
            fix="its constructor must accept the arguments of the class it replaces",
        ) from error


def named_class(name: str, field: str) -> Any:
    """The class MODULE:CLASS that a field of a configuration names.

    Raises:
        ConfigError: there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{field} {name!r} names no class: {error}", fix="MODULE:CLASS, of a module on PYTHONPATH"
        ) from error


def spec_from_name(names: tuple[str, str] | None, config: TransformerConfig) -> ModuleSpec | None:
    """`--spec module function`: import the module and call the function with the config; None for no `--spec`.

    Raises:
        ConfigError: the module or function does not exist, or does not return a `ModuleSpec`.
    """
    if names is None:
        return None
    module, function = names
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--spec: cannot import {module!r}: {error}", fix="give a module on PYTHONPATH, e.g. my_package.my_specs"
        ) from error
    try:
        make_spec = getattr(found, function)
    except (AttributeError, ImportError) as error:  # ImportError: the function has moved, and the message says where
        what = f"{module} has no function {function!r}" if isinstance(error, AttributeError) else str(error)
        fix = did_you_mean(function, dir(found)) or f"define {function}(config) there"
        raise ConfigError(f"--spec: {what}", fix=fix) from error
    spec = make_spec(config)
    if not isinstance(spec, ModuleSpec):
        raise ConfigError(
            f"--spec: {module}.{function} returned a {type(spec).__name__}",
            fix="return a minimegatron.models.spec.ModuleSpec",
        )
    return spec
