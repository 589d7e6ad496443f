"""Old names of modules and functions: importing one is an error that says the new name.

What a learner's notebook or a script imports is not lost without a word:

    >>> import minimegatron.comm.workers
    ModuleNotFoundError: minimegatron.comm.workers is now minimegatron.launch.workers
    >>> from minimegatron.layers.param import draw
    ImportError: draw of minimegatron.layers.param is now minimegatron.layers.logical.draw

The modules that moved have no code for this.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MOVED = {
    **{
        f"minimegatron.{name}": f"minimegatron.config.{name}"
        for name in ("fields", "fits", "precision", "stages", "variants")
    },
    **{f"minimegatron.{name}": f"minimegatron.commands.{name}" for name in ("doctor", "jupyter", "pretrain_gpt")},
    **{
        f"minimegatron.comm.{name}": f"minimegatron.launch.{name}"
        for name in (
            "agent",
            "agreement",
            "blame",
            "clean",
            "drivers",
            "hardware",
            "launchers",
            "ledger",
            "patience",
            "procs",
            "rank",
            "watch",
            "workers",
        )
    },
    **{f"minimegatron.{package}.forkserver": "minimegatron.launch.warm_server" for package in ("comm", "launch")},
    **{
        f"minimegatron.{package}.forkclient": "minimegatron.launch.warm_client, fork_server (Process: workers)"
        for package in ("comm", "launch")
    },
    "minimegatron.comm.guard": "minimegatron.comm.fingerprints, comm.agree, comm.calls and launch.consequence"
    " (last_collective: calls.last; before and note: calls.announce)",
    "minimegatron.comm.launch": "minimegatron.launch.torchrun (init, finish and report: minimegatron.launch.rank)",
    "minimegatron.lab": "labkit (in a notebook: %load_ext course)",
}


# Module -> name that it once had -> where that is now.
NAMES = {
    "minimegatron.layers.linear": {
        "accumulates": "minimegatron.layers.products.fusing_sink",
        "column_linear": "minimegatron.layers.products.PlainProducts",
    },
    "minimegatron.layers.deferred": {
        "Product": "minimegatron.layers.products.WeightProduct",
        "weight_gradient": "minimegatron.layers.products.weight_gradient",
    },
    "minimegatron.models.spec": {"decoder_layer_spec": "minimegatron.models.gpt_layer_specs.decoder_layer_spec"},
    "minimegatron.data.masking": {"cu_seqlens": "minimegatron.layers.mask.cu_seqlens"},
    "minimegatron.inference.model": {"View": "minimegatron.inference.model.PassCache"},
    "minimegatron.inference.static_cache": {"Next": "minimegatron.inference.static_cache.Decode"},
    "minimegatron.layers.core_attention": {"remembered": "minimegatron.layers.core_attention.cached_attention"},
    "minimegatron.layers.attention": {"Remembered": "minimegatron.layers.attention.KVCache"},
    "minimegatron.comm.p2p": {
        "Receiving": "minimegatron.comm.p2p.PendingRecv",
        "Sending": "minimegatron.comm.p2p.PendingSend",
    },
    "minimegatron.layers.param": {
        name: f"minimegatron.layers.logical.{name}"
        for name in ("draw", "draw_part", "initialize", "materialize", "gather_logical", "load_logical")
    },
    "minimegatron.training.run": {
        name: f"minimegatron.training.rules.{name}"
        for name in (
            "check_run",
            "batch_sizes",
            "check_profile",
            "check_graphs",
            "check_twin",
            "check_schedules",
            "TWIN_FLOPS",
        )
    },
    "minimegatron.training.experts": {
        name: f"minimegatron.commands.expert_loads.{name}" for name in ("main", "read_log")
    },
    "minimegatron.optim.optimizer": {"build_optimizer": "minimegatron.optim.build.build_optimizer"},
    "minimegatron.training.step": {"loss_unit": "minimegatron.optim.scaler.loss_divisor"},
}


class Moved:
    """An import finder, placed first; names that are not in the tables are left to the others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by `import name`.

        Raises:
            ModuleNotFoundError: the module has another name now.
        """
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} is now {MOVED[name]}", name=name)
        spec = PathFinder.find_spec(name, path, target) if name in NAMES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_sign(module: ModuleType) -> None:
                execute(module)
                module.__getattr__ = partial(_moved_name, name)  # type: ignore[method-assign]

            spec.loader.exec_module = execute_and_sign  # type: ignore[method-assign]
        return spec


def _moved_name(module: str, name: str) -> Any:
    """What a module is asked for and does not have."""
    if name in NAMES[module]:
        raise ImportError(f"{name} of {module} is now {NAMES[module][name]}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def announce() -> None:
    """From now on an import of an old name says the new one."""
    if Moved not in sys.meta_path:
        sys.meta_path.insert(0, Moved)
