"""`minimegatron lora`: the adapters of a run, to PEFT's format and from it, or merged into the weights.

    minimegatron sft --load Qwen2.5-0.5B --data-path chats.jsonl --lora-rank 16 --lora-alpha 32 --save run     train one
    minimegatron lora export --load run --save adapter --base Qwen2.5-0.5B          a folder that `peft` loads
    minimegatron lora merge --load run --save merged                                a published model without adapters
    minimegatron lora import --load Qwen2.5-0.5B --adapter adapter --save run       a checkpoint with PEFT's adapter

A checkpoint with adapters is loaded like any other: `generate`, `serve` and every task read it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minimegatron.errors import ConfigError
from minimegatron.flags import Parser

if TYPE_CHECKING:
    from minimegatron.checkpoint.sources import Source
    from minimegatron.config import TransformerConfig

ACTIONS = ("export", "merge", "import")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value.
    """
    parser = Parser(prog="minimegatron lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=ACTIONS)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="FOLDER", help="checkpoints of a run; to import: the base")
    add("--save", type=Path, required=True, metavar="FOLDER", help="which is not there yet")
    add("--adapter", type=Path, metavar="FOLDER", help="to import: what PEFT wrote")
    add("--base", default="", metavar="NAME", help="to export: what the adapter names as its base")
    add("--ckpt-step", type=int, metavar="N", help="of a checkpoint; default the newest")
    add("--to", choices=["hf", "ours"], default="hf", help="to merge: what to write (default: hf)")
    options = parser.parse_args(argv)
    if (options.adapter is None) == (options.action == "import"):
        raise ConfigError("--adapter goes with import, and import needs it", fix="lora import --adapter FOLDER ...")
    if options.save.exists():
        raise ConfigError(f"--save {options.save} exists", fix="choose another folder")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Export, import or merge.

    Raises:
        ConfigError, CheckpointError: nothing is written in this case.
    """
    options = parse(argv)
    from minimegatron.checkpoint import conversion, peft  # torch, which --help does not need

    model = conversion.open_model(options.load, None, options.ckpt_step)
    config, weights = conversion.checked(model, None)
    most = 5 * 10**9
    if options.action == "import":
        adapter = peft.read_adapter(options.adapter)
        tensors, config = peft.beside(weights, config, adapter, _family_of(config, weights, model.companions))
        files = conversion.write_model("ours", tensors, config, {}, options.save, most, model.companions)
        print(
            f"rank {adapter.rank} beside {', '.join(config.lora_target_modules)}: {len(files)} files in {options.save}"
        )
        return 0
    if config.lora_rank is None:
        raise ConfigError(f"{options.load} has no adapters", fix="the checkpoints of a run with --lora-rank")
    plain, merged = config.replace(lora_rank=None), peft.Merged(weights, config)
    if options.action == "export":
        adapters = {name: weights.read(name) for name in weights.tensors if ".lora" in name}
        peft.write_adapter(options.save, adapters, config, _family_of(plain, merged, model.companions), options.base)
        print(f"{len(adapters)} tensors in {options.save}")
        return 0
    tensors, keys = conversion.target(options.to, plain, merged, model.companions, None)
    files = conversion.write_model(options.to, tensors, plain, keys, options.save, most, model.companions)
    print(f"{len(merged.loras)} adapters merged: {len(files)} files in {options.save}")
    return 0


def _family_of(config: TransformerConfig, weights: Source, companions: Path | None) -> str:
    """The family as which the model would be published."""
    from minimegatron.checkpoint import conversion

    return str(conversion.target("hf", config, weights, companions, None)[1]["model_type"])
