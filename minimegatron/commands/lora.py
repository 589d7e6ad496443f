"""`minimegatron lora`: the adapters of a run, to PEFT's format and from it, or merged into the weights.

    minimegatron sft --load Qwen2.5-0.5B --data-path chats.jsonl --lora-rank 16 --lora-alpha 32 --save run     train one
    minimegatron lora export --load run --save adapter --base Qwen2.5-0.5B          a folder that `peft` loads
    minimegatron lora merge --load run --save merged                                a published model without adapters
    minimegatron lora import --load Qwen2.5-0.5B --adapter adapter --save run       a checkpoint with PEFT's adapter

A checkpoint with adapters is loaded like any other: `generate`, `serve` and every task read it. That of a run with
`--lora-base` has the adapters and what is not packed, and the packed weights are read from their folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minimegatron.errors import ConfigError
from minimegatron.flags import Parser

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
    add("--dequantize", action="store_true", help="to merge or import: int4 and int8 weights are written as whole ones")
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
    if model.words is not None and options.action != "export" and not options.dequantize:
        raise ConfigError(
            f"lora {options.action} beside the packed weights of {options.load}: "
            + (
                "a sum is no multiple of their scales"
                if options.action == "merge"
                else "a checkpoint of ours has none packed"
            ),
            fix="--dequantize, which writes whole weights; or leave the adapter beside them: minimegatron serve FOLDER "
            "--lora-modules NAME=ADAPTER",
        )
    config, weights = conversion.checked(model, None)
    most = 5 * 10**9
    if options.action == "import":
        adapter = peft.read_adapter(options.adapter)
        tensors, config = peft.beside(weights, config, adapter, conversion.family_of(config, weights, model.companions))
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
        peft.write_adapter(
            options.save, adapters, config, conversion.family_of(plain, merged, model.companions), options.base
        )
        print(f"{len(adapters)} tensors in {options.save}")
        return 0
    tensors, keys = conversion.target(options.to, plain, merged, model.companions, None)
    files = conversion.write_model(options.to, tensors, plain, keys, options.save, most, model.companions)
    print(f"{len(merged.loras)} adapters merged: {len(files)} files in {options.save}")
    return 0
