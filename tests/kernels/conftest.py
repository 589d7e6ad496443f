"""Kernels need a C++ compiler; without one their tests are skipped, which says so."""

from __future__ import annotations

import pytest

from minimegatron.kernels import build


def pytest_collection_modifyitems(items) -> None:
    if build.compiler("emulated") is None:
        for item in items:
            if "tests/kernels" in str(item.path) and "no_compiler" not in item.name:
                item.add_marker(pytest.mark.skip(reason="no g++ or clang++: kernels cannot be emulated here"))
