"""`minimegatron quantize`: quantise a model to 4 or 8 bits a weight, in the format that transformers and vLLM load.

    minimegatron quantize Qwen2.5-0.5B --save int8 --scheme int8
    minimegatron quantize ckpt --save int4 --scheme int4 --calibration mine.txt --text held-out.txt

It reads a published folder or a checkpoint of a run, and writes `config.json`, safetensors in the format
`compressed-tensors`, and the tokenizer. `minimegatron generate`, `convert` and `train --load` read the result, too.

| `--scheme` | a weight is | a scale for                                        | `--calibration`                  |
|------------|-------------|----------------------------------------------------|----------------------------------|
| `int8`     | 8 bits      | each output channel                                | not needed                       |
| `int4`     | 4 bits      | each group of 128 inputs (`--group-size`) of each  | a text, for activation-aware     |
|            |             | output channel                                     | scales (AWQ)                     |
| `fp8`      | float8 e4m3 | each output channel                                | not needed                       |

Activations, embedding, head, norms and routers are not quantised. With `--calibration` the channels of the model are
first rescaled by their activations, so that rounding costs less (`inference/awq`); use a few thousand tokens of text
like the model's later inputs. `--text` prints the perplexity before and after.

With `--calibration` or `--text` the whole model is in memory in fp32; otherwise one tensor at a time is.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.errors import CheckpointError, ConfigError, DataError
from minimegatron.flags import Parser

if TYPE_CHECKING:
    import torch

    from minimegatron.checkpoint.conversion import Model
    from minimegatron.checkpoint.sources import Source
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.kernels.quantized import Scheme


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value.
    """
    parser = Parser(
        prog="minimegatron quantize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    add = parser.add_argument
    add("--save", type=Path, required=True, metavar="FOLDER", help="a new folder")
    add("--scheme", choices=["int8", "int4", "fp8"], required=True)
    add("--group-size", type=int, metavar="N", help="for int4: inputs that share a scale (default: 128)")
    add("--calibration", type=Path, metavar="FILE", help="for int4: a text for activation-aware scales (AWQ)")
    add("--calibration-tokens", type=int, default=65536, metavar="N", help="most tokens of it (default: 65536)")
    add("--text", type=Path, metavar="FILE", help="another text: print its perplexity before and after")
    add("--seq-length", type=int, metavar="N", help="tokens of the pieces that texts are cut into (default: 512)")
    add("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    add("--ckpt-step", type=int, metavar="N", help="step of a checkpoint (default: the newest)")
    add("--family", metavar="NAME", help="model_type to write (default: the first that can describe the model)")
    add("--max-shard-size", type=int, default=5 * 10**9, metavar="BYTES", help="largest file (default: 5 GB)")
    dtype = parser.add_mutually_exclusive_group()
    for name in ("fp32", "bf16", "fp16"):
        dtype.add_argument(f"--{name}", dest="dtype", action="store_const", const=name, help=f"the rest is {name}")
    args = parser.parse_args(argv)
    for flag, value in (("--group-size", args.group_size), ("--calibration", args.calibration)):
        if value is not None and args.scheme != "int4":
            raise ConfigError(f"{flag} means nothing with --scheme {args.scheme}", fix=f"drop {flag}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Quantise.

    Raises:
        ConfigError, CheckpointError, DataError: invalid flags, model or text; nothing was written.
    """
    args = parse(argv)
    import dataclasses

    from minimegatron.checkpoint import compressed_tensors, conversion
    from minimegatron.checkpoint.hf_config import read_json
    from minimegatron.checkpoint.huggingface import as_theirs
    from minimegatron.kernels.quantized import SCHEMES

    scheme = SCHEMES[args.scheme]
    if args.group_size is not None:
        scheme = dataclasses.replace(scheme, group_size=args.group_size)
    model = conversion.open_model(args.folder, step=args.ckpt_step)
    companions = model.companions
    if model.kind == "hf" and compressed_tensors.KEY in read_json(args.folder / "config.json", "a model's folder"):
        raise ConfigError("the weights are quantised already", where=str(args.folder), fix="quantise the original")
    config, weights = conversion.checked(model, args.dtype)
    tensors, keys = conversion.target("hf", config, weights, companions, args.family)
    family = str(keys["model_type"])
    names, kept = compressed_tensors.linear_weights(config, family)
    compressed_tensors.check_divides(scheme, tensors.tensors, names)
    dtypes = {name: described.dtype for name, described in tensors.tensors.items()}
    texts = texts_of(args, model)
    before = None
    if texts:
        loaded = load_alone(model)
        before = perplexity(loaded, texts["--text"]) if "--text" in texts else None
        if "--calibration" in texts:
            tensors = as_theirs(_scaled(loaded, texts["--calibration"], scheme), config, family)
        del loaded
    elif scheme.group_size is not None:
        print("without --calibration every group is rounded as it is")
    plain = sum(described.nbytes for described in tensors.tensors.values())
    if "--calibration" in texts:  # these are fp32
        plain = sum(math.prod(d.shape) * dtypes[name].itemsize for name, d in tensors.tensors.items())
    quantised = compressed_tensors.Quantised(tensors, dtypes, names, scheme)
    keys[compressed_tensors.KEY] = compressed_tensors.quantization_config(scheme, kept)
    conversion.write_model("hf", quantised, config, keys, args.save, args.max_shard_size, companions)
    total = sum(described.nbytes for described in quantised.tensors.values())
    print(
        f"{len(names)} matrices in {args.scheme}, {total:,} bytes of {plain:,} ({plain / total:.2f} times smaller): "
        f"{args.save}"
    )
    if before is not None:
        after = perplexity(load_alone(conversion.open_model(args.save)), texts["--text"])
        print(f"perplexity of {args.text}: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})")
    return 0


def texts_of(args: argparse.Namespace, model: Model) -> dict[str, torch.Tensor]:
    """The ids [n, s] of each text given, by flag.

    Raises:
        CheckpointError, ConfigError, DataError: there is no tokenizer, a length is impossible, a text cannot be read.
    """
    from minimegatron.data.tokenizer import HuggingFaceTokenizer

    given = {flag: path for flag, path in (("--text", args.text), ("--calibration", args.calibration)) if path}
    if not given:
        return {}
    folder = args.tokenizer_model or model.tokenizer
    if folder is None:
        raise CheckpointError(
            "there is no tokenizer in it", where=str(args.folder), fix="--tokenizer-model FOLDER names one"
        )
    tokenizer = HuggingFaceTokenizer(folder)
    length = args.seq_length or min(512, model.config.max_position_embeddings)
    if not 2 <= length <= model.config.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {length}, and the model has {model.config.max_position_embeddings} positions",
            fix="at least 2, at most as many as it has",
        )
    most = {"--calibration": args.calibration_tokens}
    return {flag: pieces(path, tokenizer, length, most.get(flag)) for flag, path in given.items()}


def pieces(path: Path, tokenizer: HuggingFaceTokenizer, length: int, most: int | None = None) -> torch.Tensor:
    """A text as ids [n, length]; [1, all] if it is shorter. An incomplete last piece is dropped.

    Args:
        path: of the text, UTF-8.
        tokenizer: the model's.
        length: tokens of a piece.
        most: number of tokens to use, from the beginning; None: all.

    Raises:
        DataError: it cannot be read, or has fewer than two tokens.
    """
    import torch

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), fix="a text file in UTF-8") from error
    ids = tokenizer.tokenize(text)[: most if most is None else max(most, 2)]
    if len(ids) < 2:
        raise DataError(f"{len(ids)} tokens", where=str(path), fix="a text of a few thousand")
    length = min(length, len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def perplexity(model: Any, tokens: torch.Tensor) -> float:
    """exp of the mean loss over the tokens [n, s], without the first of each piece."""
    import torch

    total = 0.0
    with torch.no_grad():
        for row in tokens:
            row = row[None].to(model.mesh.device)
            total += model(row[:, :-1], labels=row[:, 1:]).double().sum().item()
    return math.exp(total / (tokens.numel() - len(tokens)))


def load_alone(model: Model) -> Any:
    """The whole model on one rank, in fp32.

    Raises:
        ConfigError: it does not predict next words.
    """
    from minimegatron.comm.mesh import Mesh
    from minimegatron.inference.loading import load
    from minimegatron.models.chunks import stage_class

    if not (found := stage_class(model.config)).predicts_next:
        raise ConfigError(f"a {found.__name__} predicts no next words, by which a text is scored", fix="a decoder")
    return load(model, Mesh.serial(), "fp32", packed=False)


def _scaled(model: Any, tokens: torch.Tensor, scheme: Scheme) -> Source:
    """The weights of a model by logical name, rescaled by the activations on a text."""
    from minimegatron.checkpoint.sources import InMemory
    from minimegatron.inference.awq import scale_by_activations
    from minimegatron.layers.param import layout_of, logical_parameters

    report = scale_by_activations(model, tokens, scheme)
    error, plain = sum(each[1] for each in report), sum(each[2] for each in report)
    worst = max(report, key=lambda each: each[1])
    print(
        f"{tokens.numel():,} tokens chose the scales of {len(report)} places: the squared error of their products is "
        f"{error / plain if plain else 1:.3f} of what rounding alone makes; the largest is {worst[0]}"
    )
    return InMemory(
        {name: param.detach()[: layout_of(param).unpadded_shape[0]].cpu() for name, param in logical_parameters(model)}
    )
