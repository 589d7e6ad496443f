"""A part that only some models have is named, and imported when a model wants it.

So a dense decoder is built, and read, without the files of experts, of FP8 or of context parallelism::

    MOE: Named = "minimegatron.layers.moe.layer", "MoELayer"
    import_module(MOE)(config, mesh)

Megatron-LM: `import_module` in `megatron/core/transformer/spec_utils.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

Named = tuple[str, str]  # module, name in it


def import_module(named: Named) -> Any:
    """The class or function with this name."""
    return getattr(importlib.import_module(named[0]), named[1])
