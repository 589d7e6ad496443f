"""What once had another name says its new one."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from minimegatron import moved


@pytest.mark.parametrize("old", moved.MOVED)
def test_an_old_module_says_its_new_name(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="is now") as caught:
        importlib.import_module(old)
    first = str(caught.value).removeprefix(f"{old} is now ").split(" ")[0].rstrip(",")
    assert importlib.util.find_spec(first) is not None, first


@pytest.mark.parametrize(("module", "old"), [(module, old) for module, names in moved.NAMES.items() for old in names])
def test_an_old_name_says_its_new_place(module: str, old: str) -> None:
    with pytest.raises(ImportError, match=f"{old} of {module} is now"):
        getattr(importlib.import_module(module), old)
    place, _, name = moved.NAMES[module][old].rpartition(".")
    assert hasattr(importlib.import_module(place), name)


def test_a_name_that_nobody_ever_had_is_an_attribute_error() -> None:
    assert not hasattr(importlib.import_module("minimegatron.layers.param"), "nobody_ever_had_this")
