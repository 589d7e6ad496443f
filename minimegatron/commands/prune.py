"""`minimegatron prune`: a smaller model of the parts that a larger one uses most on a text; distillation mends it.

    minimegatron prune runs/large --save small --calibration mine.txt --target-ffn-hidden-size 1024
    minimegatron distill --load small --use-checkpoint-args --finetune --teacher runs/large --data-path chats.jsonl ...

It reads a published folder or a checkpoint, written by any layout, and writes the same kind: `convert` makes the other
of it. `posttraining/importance` scores the parts, `posttraining/prune` takes them out. The flags are Megatron-LM's.

| flag                           | chosen                           | refused for                                     |
|--------------------------------|----------------------------------|-------------------------------------------------|
| `--target-ffn-hidden-size`     | in each layer by itself          | experts                                         |
| `--target-num-query-groups`    | in each layer: key heads with    | multi-latent attention; one norm over all heads |
|                                | their query heads                | (OLMo 2)                                        |
| `--target-num-attention-heads` | in each group, as many in each   | as above                                        |
| `--target-hidden-size`         | once for all layers              | multi-latent attention; scaled embeddings       |
|                                |                                  | (Gemma)                                         |
| `--target-num-layers`          | `--layer-importance`: by block   | nothing                                         |
|                                | influence, or by the loss        |                                                 |
|                                | without                          |                                                 |

Adapters have to be merged before (`minimegatron lora`); layers of multi-token prediction are refused.

One process reads the text with the whole model in fp32; no ranks are needed, whatever layout has written the
checkpoint. Take a few thousand tokens of text like the model's later inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.errors import ConfigError
from minimegatron.flags import Parser

if TYPE_CHECKING:
    import torch

    from minimegatron.posttraining.importance import Scores

FLAGS = {
    "ffn_hidden_size": "neurons of each MLP",
    "num_attention_heads": "query heads of each layer",
    "num_query_groups": "key heads of each layer, with the query heads that share them,",
    "hidden_size": "channels of the residual stream",
    "num_layers": "layers",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value; no target.
    """
    parser = Parser(
        prog="minimegatron prune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--save", type=Path, required=True, metavar="FOLDER", help="a new folder")
    add("--calibration", type=Path, required=True, metavar="FILE", help="a text that the parts are scored on")
    add("--calibration-tokens", type=int, default=65536, metavar="N", help="most tokens of it (default: 65536)")
    for name, what in FLAGS.items():
        add(f"--target-{name.replace('_', '-')}", type=int, metavar="N", help=f"so many {what} stay (default: all)")
    add(
        "--layer-importance",
        choices=["influence", "loss"],
        default="influence",
        help="which layers go: those with the least block influence; or one after the other the one without which the "
        "loss of the calibration text is least, which reads the text as often as there are layers, for each that goes "
        "(default: influence)",
    )
    add("--text", type=Path, metavar="FILE", help="another text, whose perplexity is printed before and after as well")
    add("--seq-length", type=int, metavar="N", help="tokens of the pieces that texts are cut into (default: 512)")
    add("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    add("--ckpt-step", type=int, metavar="N", help="step of a checkpoint (default: the newest)")
    add("--max-shard-size", type=int, default=5 * 10**9, metavar="BYTES", help="largest file (default: 5 GB)")
    args = parser.parse_args(argv)
    if not targets_of(args):
        raise ConfigError("prune to which size?", fix="--target-num-layers N, or one of the other targets")
    return args


def targets_of(args: argparse.Namespace) -> dict[str, int]:
    """{name of the size: target} of those that were given."""
    given = {name: getattr(args, f"target_{name}") for name in FLAGS}
    return {name: size for name, size in given.items() if size is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Prune.

    Raises:
        ConfigError, CheckpointError, DataError: invalid flags, model or text; nothing was written.
    """
    args = parse(argv)
    import tempfile

    from minimegatron.checkpoint import conversion
    from minimegatron.commands.quantize import load_alone, perplexity, texts_of
    from minimegatron.posttraining import importance, prune

    model = conversion.open_model(args.folder, step=args.ckpt_step)
    config, weights = conversion.checked(model, None)
    after = prune.sizes_after(config, targets_of(args))
    texts = texts_of(args, model)
    loaded = load_alone(model)
    scores = importance.measure(loaded, texts["--calibration"])
    dropped = _dropped(args, loaded, scores, config.num_layers - after["num_layers"], texts["--calibration"])
    before = {flag: perplexity(loaded, text) for flag, text in texts.items()}
    del loaded
    kept = prune.choose(config, after, scores, dropped)
    small, pruned = prune.pruned_config(config, after, kept), prune.Pruned(weights, config, kept)
    for line in prune.described(config, scores, kept):
        print(line)
    kind = "hf" if model.kind == "hf" else "ours"
    with tempfile.TemporaryDirectory() as folder:
        companions = conversion.companions_without_config(model, Path(folder))
        tensors, keys = conversion.target(kind, small, pruned, companions, model.family)
        conversion.write_model(kind, tensors, small, keys, args.save, args.max_shard_size, companions)
    written = conversion.open_model(args.save)
    conversion.checked(written, None)
    sizes = [sum(each.nbytes for each in source.tensors.values()) for source in (weights, written.weights)]
    print(f"{sizes[1]:,} bytes of {sizes[0]:,} ({sizes[1] / sizes[0]:.1%}): {args.save}")
    loaded = load_alone(written)
    for flag, text in texts.items():
        now = perplexity(loaded, text)
        print(f"perplexity of {getattr(args, flag[2:])}: {before[flag]:.4f} before, {now:.4f} after")
    return 0


def _dropped(args: argparse.Namespace, model: Any, scores: Scores, count: int, tokens: torch.Tensor) -> list[int]:
    """The numbers of the layers that go."""
    from minimegatron.commands.quantize import perplexity
    from minimegatron.posttraining import importance

    if args.layer_importance == "influence":
        return importance.drop_by_influence(scores, count)
    return importance.drop_by_loss(model, count, lambda: perplexity(model, tokens))
