"""`minimegatron convert`: a published model becomes a checkpoint, a checkpoint becomes a model that can be published.

    minimegatron convert --load Qwen2.5-0.5B --save ckpt                    from Hugging Face, for any layout
    minimegatron convert --load ckpt --save out --to hf                     and back
    minimegatron convert --load ckpt --save out --to hf --dry-run           every tensor: what it is made of
    minimegatron convert --load megatron --save ckpt --to ours              from Megatron's torch_dist; --to it as well
    minimegatron convert --load ckpt --save trt --to tensorrt_llm --target-tensor-parallel-size 2       a file a rank

Nothing is downloaded, nothing that is read is executed, and no more than a tensor is in memory. A target folder is
there whole or not at all. (`minimegatron train --load Qwen2.5-0.5B` continues a published model without this.)

The names of Megatron-LM's `tools/checkpoint/convert.py` are understood:

| given                                          | means                                                             |
|------------------------------------------------|-------------------------------------------------------------------|
| `--load-dir`, `--save-dir`                     | `--load`, `--save`                                                |
| `--loader llama_mistral`, `mixtral_hf`, `core` | `--from hf`, `torch_dist`                                         |
| `--saver core`, `mcore`                        | `--to ours`                                                       |
| `--bf16`, `--fp16`                             | dtype of the weights that are written                             |
| `--true-vocab-size`                            | the vocabulary without padding                                    |
| `--target-tensor-parallel-size` and the like   | nothing: any layout loads the checkpoint (but TensorRT-LLM's)     |
| `--model-type GPT`, `--checkpoint-type hf`, `--model-size`, `--tokenizer-model` | nothing: the folder says it      |
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minimegatron.errors import CheckpointError, ConfigError, did_you_mean
from minimegatron.flags import Parser

LOADERS = {"llama_mistral": "hf", "llama2_hf": "hf", "mixtral_hf": "hf", "hf": "hf", "core": "torch_dist"}
SAVERS = {"core": "ours", "mcore": "ours", "hf": "hf"}
# Accepted from Megatron's tool, with the values it may have here and why it changes nothing.
ALREADY: dict[str, tuple[tuple[str, ...], str]] = {
    "--model-type": (("GPT",), "all models here are"),
    "--checkpoint-type": (("hf",), "the folder says it"),
    "--model-size": ((), "sizes are those of config.json"),
    "--megatron-path": ((), "Megatron-LM is not used"),
    "--target-pipeline-parallel-size": ((), "any layout loads the checkpoint"),
    "--target-expert-parallel-size": ((), "any layout loads the checkpoint"),
    "--make-vocab-size-divisible-by": ((), "padding of the vocabulary is not stored"),
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value.
    """
    parser = Parser(
        prog="minimegatron convert",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--from", dest="source", choices=["hf", "ours", "torch_dist"], help="what --load is; default: what lies in it")
    add(
        "--to",
        choices=["hf", "ours", "torch_dist", "tensorrt_llm"],
        help="what to write; default hf, and ours of what is hf",
    )
    add("--load", "--load-dir", type=Path, required=True, metavar="FOLDER")
    add("--save", "--save-dir", type=Path, metavar="FOLDER", help="which is not there yet")
    add("--target-tensor-parallel-size", type=int, metavar="N", help="to tensorrt_llm: ranks of tp (default: 1)")
    add("--ckpt-step", type=int, metavar="N", help="of a checkpoint; default the newest")
    add("--dry-run", action="store_true", help="say what each tensor would be made of, and write nothing")
    add("--max-shard-size", type=_size, metavar="5GB", help="of a file; default 5GB")
    add("--family", metavar="NAME", help="to hf: which model_type; default the first that can say what the model is")
    add(
        "--hf-model",
        metavar="FOLDER|none",
        help="to hf: whose config.json and tokenizer; default those that the model began with; none: a new config.json",
    )
    add("--no-load-optim", action="store_true", help="to ours: the weights without the state of the optimizer")
    add("--true-vocab-size", type=int, metavar="N", help="tokens of a checkpoint of Megatron's that only has padding")
    dtype = parser.add_mutually_exclusive_group()
    for name in ("fp32", "bf16", "fp16"):
        dtype.add_argument(f"--{name}", dest="dtype", action="store_const", const=name, help=f"write weights in {name}")
    add("--loader", choices=LOADERS, help=argparse.SUPPRESS)
    add("--saver", choices=SAVERS, help=argparse.SUPPRESS)
    add("--tokenizer-model", type=Path, help=argparse.SUPPRESS)
    for flag in ALREADY:
        add(flag, dest=flag, help=argparse.SUPPRESS)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [name for action in parser._actions for name in action.option_strings]
        hint = did_you_mean(unknown[0].split("=")[0], flags)
        raise ConfigError(f"there is no flag {unknown[0]}", fix=hint or "see minimegatron convert --help")
    options.source = _one(options.source, LOADERS.get(options.loader), "--from", "--loader")
    options.to = _one(options.to, SAVERS.get(options.saver), "--to", "--saver")
    return options


def _one(value: str | None, other: str | None, flag: str, other_flag: str) -> str | None:
    if value is not None and other is not None and value != other:
        raise ConfigError(f"{flag} {value} and {other_flag} mean different things", fix="give one of them")
    return value or other


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; for example 5GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def _say_what_changes_nothing(options: argparse.Namespace) -> None:
    for flag, (allowed, why) in ALREADY.items():
        value = getattr(options, flag)
        if value is None:
            continue
        if allowed and value not in allowed:
            raise ConfigError(f"{flag} {value} is not supported", fix=f"{flag} {' or '.join(allowed)}")
        print(f"{flag} changes nothing: {why}")
    if options.target_tensor_parallel_size is not None and options.to != "tensorrt_llm":
        print("--target-tensor-parallel-size changes nothing: any layout loads the checkpoint")
    path = options.tokenizer_model
    if path is not None and options.load.resolve() not in (path.resolve(), *path.resolve().parents):
        raise ConfigError(
            f"--tokenizer-model {path} lies outside of --load", fix="copy the tokenizer's files next to config.json"
        )


def _refuse_what_means_nothing(options: argparse.Namespace, source: str, target: str) -> None:
    given = {
        "--no-load-optim": options.no_load_optim and (source == "hf" or target != "ours"),
        "--true-vocab-size": options.true_vocab_size is not None and source != "torch_dist",
        "--family": options.family is not None and target not in ("hf", "tensorrt_llm"),
        "--max-shard-size": options.max_shard_size is not None and target in ("torch_dist", "tensorrt_llm"),
        "--target-pipeline-parallel-size": options.__dict__["--target-pipeline-parallel-size"] not in (None, "1")
        and target == "tensorrt_llm",
    }
    for flag, useless in given.items():
        if useless:
            raise ConfigError(f"{flag} means nothing from {source} to {target}", fix=f"drop {flag}")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert.

    Raises:
        ConfigError, CheckpointError: nothing is written in this case.
    """
    options = parse(argv)
    from minimegatron.checkpoint import conversion  # torch, which --help does not need

    _say_what_changes_nothing(options)
    like = None if options.hf_model in (None, "none") else Path(options.hf_model)
    model = conversion.open_model(options.load, options.source, options.ckpt_step, options.true_vocab_size, like)
    kind = options.to or ("ours" if model.kind == "hf" else "hf")
    companions = _companions(options, model, kind, like)
    _refuse_what_means_nothing(options, model.kind, kind)
    most = options.max_shard_size or 5 * 10**9
    config, weights = conversion.checked(model, options.dtype)
    run = None
    if model.optimizer_state and kind == "ours" and not options.no_load_optim:
        run = conversion.goes_on(model, config, weights)
    if model.optimizer_state:
        print(
            f"{model.optimizer_state}: goes on at iteration {run.step}"
            if run
            else f"left where it is: {model.optimizer_state}"
        )
    tensors, keys = conversion.target(
        kind,
        config,
        weights,
        companions,
        options.family,
        own=options.hf_model == "none",
        tp=options.target_tensor_parallel_size or 1,
    )
    if options.dry_run:
        print("\n".join(conversion.explain(conversion.all_of(tensors, run))))
        return 0
    if options.save is None:
        raise ConfigError("where to?", fix="--save FOLDER, or --dry-run")
    files = conversion.write_model(kind, tensors, config, keys, options.save, most, companions, run)
    written = conversion.all_of(tensors, run).tensors
    total = sum(described.nbytes for described in written.values())
    what = f"{len(written)} tensors, {total:,} bytes, {config.params_dtype}"
    print(f"{what}: {len(files)} files in {options.save}")
    for line in conversion.remarks(options.save, keys) if kind == "hf" else ():
        print(line)
    return 0


def _companions(options: argparse.Namespace, model: Any, kind: str, like: Path | None) -> Path | None:
    """Folder with the files beside the weights; a checkpoint of Megatron's or TensorRT-LLM's needs none."""
    if options.hf_model is not None and kind != "hf" and model.kind != "torch_dist":
        raise ConfigError(f"--hf-model with --to {kind}", fix="drop it: it says what a published folder looks like")
    has_files = kind not in ("torch_dist", "tensorrt_llm")
    folder = like or (model.companions if has_files else None)
    if folder is None and model.companions_hash and options.hf_model is None and has_files:
        raise CheckpointError(
            "the tokenizer and the other files beside the weights are missing",
            where=str(model.companions_folder),
            fix="copy the folder from where the run saved it, or name another: --hf-model FOLDER, or none",
        )
    return folder
