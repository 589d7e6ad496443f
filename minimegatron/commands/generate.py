"""`minimegatron generate`: continue a prompt with a published model, or with a checkpoint of a run.

    minimegatron generate FOLDER "Once upon a time" --max-new-tokens 50 --temperature 0.8 --top-p 0.95
    torchrun --standalone --nproc-per-node 2 -m minimegatron generate FOLDER "Once upon a time"     2 ranks (tp2)

FOLDER is a downloaded model (`config.json`, its weights in `*.safetensors`, and `tokenizer.json`), or what `--save` of
a run named: then `--tokenizer-model` says where the tokenizer is, unless the folder came from a published model.
Nothing is downloaded here. Each rank reads its part of every matrix. Without `--temperature`, `--top-k` and `--top-p`
every word is the most likely one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minimegatron.flags import Parser

if TYPE_CHECKING:
    from minimegatron.checkpoint.conversion import Model
    from minimegatron.comm.mesh import Mesh
    from minimegatron.models.decoder import GPTModel


def load(found: Model, mesh: Mesh, params_dtype: str) -> GPTModel:
    """This rank's part of a model, ready to generate.

    Raises:
        CheckpointError: the weights are not those of the configuration.
    """
    from minimegatron.checkpoint.regions import Logical, logical_shape, regions
    from minimegatron.layers.param import layout_of, logical_parameters
    from minimegatron.models.decoder import GPTModel
    from minimegatron.models.weights import fill

    model = GPTModel(found.config.replace(params_dtype=params_dtype), mesh)
    held: dict[str, Logical] = {}
    for name, param in logical_parameters(model):
        values, layout = param.detach().zero_(), layout_of(param)  # padding of the vocabulary is in no file
        held[name] = Logical(logical_shape(layout), regions(layout, values), param.dtype)
    fill(held, found, params_dtype)
    return model.eval().to(mesh.device)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="minimegatron generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="of a checkpoint; default the newest")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--params-dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    return parser.parse_args(argv)


def continue_prompt(args: argparse.Namespace) -> None:
    """Load, generate, and print on rank 0.

    Raises:
        MinimegatronError: the folder holds no model that can generate here.
    """
    import torch

    from minimegatron.checkpoint.conversion import open_model
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import ParallelConfig
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.errors import CheckpointError
    from minimegatron.inference.generate import generate
    from minimegatron.inference.sampling import GREEDY, SamplingParams
    from minimegatron.launch.rank import init

    rank, world = init()
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    found = open_model(args.folder, step=args.ckpt_step)
    where = args.tokenizer_model or found.tokenizer
    if where is None:
        raise CheckpointError(
            "there is no tokenizer in it", where=str(args.folder), fix="--tokenizer-model FOLDER names one"
        )
    tokenizer, model = HuggingFaceTokenizer(where), load(found, mesh, args.params_dtype)
    draws = (args.temperature, args.top_k, args.top_p) != (1.0, 0, 0.0)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p) if draws else GREEDY
    prompt = tokenizer.tokenize(args.prompt)
    (made,) = generate(model, [prompt], args.max_new_tokens, sampling, stop_ids=[tokenizer.eod], seed=args.seed)
    if rank == 0:
        print(args.prompt + tokenizer.detokenize(prompt + made.tokens)[len(tokenizer.detokenize(prompt)) :])
        mean = torch.tensor(made.log_probs).mean().item()
        print(f"({len(made.tokens)} tokens, mean log-probability {mean:.3f})", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    """The whole life of this process."""
    args = parse(argv)
    from minimegatron.launch.rank import run_rank

    run_rank(lambda: continue_prompt(args))
