"""A model of transformers in which every cast to fp32 is one to fp64: an oracle in which rounding hides nothing."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types

_FLOAT32, _FLOAT = re.compile(r"torch\.float(32)?\b(?!\w)"), re.compile(r"\.float\(\)")


@functools.cache
def in_fp64(name: str) -> types.ModuleType:
    """`transformers.models.NAME.modeling_NAME`, so changed."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = _FLOAT.sub(".double()", _FLOAT32.sub("torch.float64", inspect.getsource(module)))
    twin = types.ModuleType(f"{module.__name__}_in_fp64")
    twin.__package__, twin.__file__ = module.__package__, module.__file__
    sys.modules[twin.__name__] = twin
    exec(compile(source, str(module.__file__), "exec"), vars(twin))  # noqa: S102  transformers' own source
    return twin
