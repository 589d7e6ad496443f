"""`minimegatron generate`: continue a prompt with a published model, or with a checkpoint of a run.

    minimegatron generate FOLDER "Once upon a time" --max-new-tokens 50 --temperature 0.8 --top-p 0.95
    minimegatron generate FOLDER "Who are you?" --chat                                              a question
    torchrun --standalone --nproc-per-node 2 -m minimegatron generate FOLDER "Once upon a time"     2 ranks (tp2)

FOLDER is a downloaded model (`config.json`, its weights in `*.safetensors`, and `tokenizer.json`), or what `--save` of
a run named: then `--tokenizer-model` says where the tokenizer is, unless the folder came from a published model.
Nothing is downloaded here. Each rank reads its part of every matrix.

**Tokens** are drawn where one of `--temperature`, `--top-k` and `--top-p` is given, whatever its value; without them
every token is the most likely one.

**Special tokens** in a prompt (`<|im_start|>`) are read as tokens: its writer may have used a chat template. With
`--split-special-tokens` they are letters. What the tokenizer puts before a text (Llama's `<s>`) is added unless the
prompt begins with it. With `--chat` the model's own template spells the prompt as what a user says, and the answer is
printed alone.

**The end** is a token that `eos_token_id` of `generation_config.json` names, else of `config.json`, else the
tokenizer's end of document, or one of `--stop-token-ids`.
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
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.inference.sampling import SamplingParams
    from minimegatron.models.contract import LanguageModel


def load(model_folder: Model, mesh: Mesh, params_dtype: str) -> LanguageModel:
    """This rank's part of a model, ready to generate.

    Raises:
        CheckpointError: the weights are not those of the configuration.
    """
    from minimegatron.checkpoint.conversion import fill
    from minimegatron.checkpoint.regions import Logical, regions
    from minimegatron.layers.param import layout_of, logical_parameters
    from minimegatron.models.chunks import build_stage

    model = build_stage(model_folder.config.replace(params_dtype=params_dtype), mesh)
    tensors: dict[str, Logical] = {}
    for name, param in logical_parameters(model):
        values, layout = param.detach().zero_(), layout_of(param)  # padding of the vocabulary is in no file
        tensors[name] = Logical(layout.unpadded_shape, regions(layout, values), param.dtype)
    fill(tensors, model_folder, params_dtype)
    return model.eval().to(mesh.device)  # type: ignore[no-any-return]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value, or two that contradict each other.
    """
    parser = Parser(
        prog="minimegatron generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    add, yes_or_no = parser.add_argument, argparse.BooleanOptionalAction
    add("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    add("--ckpt-step", type=int, metavar="N", help="of a checkpoint; default the newest")
    add("--max-new-tokens", type=int, default=50, metavar="N", help="at most so many (default: 50)")
    add("--temperature", type=float, metavar="T", help="draw from softmax(logits / T)")
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens; 0 from all, 1 takes the first")
    add("--top-p", type=float, metavar="P", help="draw from the most likely tokens with a mass of P; 0 or 1 from all")
    add("--seed", type=int, metavar="N", help="of the draws (default: 0)")
    add("--chat", action="store_true", help="the prompt is what a user says; print the answer")
    split = "special tokens in the prompt are letters (default: they are tokens, or as tokenizer_config.json says)"
    add("--split-special-tokens", action=yes_or_no, help=split)
    begins = "begin as the tokenizer does, with <s> for example (default: unless the prompt does, and not with --chat)"
    add("--add-special-tokens", action=yes_or_no, help=begins)
    stop = "ids that end the text, none for none (default: those that the model's files say)"
    add("--stop-token-ids", type=int, nargs="*", metavar="N", help=stop)
    add("--params-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default: fp32)")
    args = parser.parse_args(argv)
    if args.chat and (args.split_special_tokens or args.add_special_tokens is not None):
        flag = "--split-special-tokens" if args.split_special_tokens else "--add-special-tokens"
        parser.error(f"{flag} with --chat: the template spells all special tokens itself; drop one of the two")
    return args


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What was given of temperature, top_k and top_p; greedy where none was.

    Raises:
        ConfigError: a value that is out of range.
    """
    from minimegatron.inference.sampling import GREEDY, SamplingParams

    names = ("temperature", "top_k", "top_p")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SamplingParams(**given) if given else GREEDY


def continue_prompt(args: argparse.Namespace) -> None:
    """Load, generate, and print on rank 0.

    Raises:
        MinimegatronError: the folder holds no model that can generate here.
    """
    import torch

    from minimegatron.checkpoint.companions import stop_ids
    from minimegatron.checkpoint.conversion import open_model
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import ParallelConfig
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.errors import CheckpointError
    from minimegatron.inference.generate import generate
    from minimegatron.launch.rank import init

    sampling = sampling_params(args)
    rank, world = init()
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    model_folder = open_model(args.folder, step=args.ckpt_step)
    tokenizer_folder = args.tokenizer_model or model_folder.tokenizer
    if tokenizer_folder is None:
        raise CheckpointError(
            "there is no tokenizer in it", where=str(args.folder), fix="--tokenizer-model FOLDER names one"
        )
    tokenizer = HuggingFaceTokenizer(
        tokenizer_folder, split_special_tokens=False if args.chat else args.split_special_tokens
    )
    prompt, notes = read_prompt(args, tokenizer)
    if args.seed is not None and sampling.greedy:
        notes.append(f"--seed {args.seed} changes nothing: every token is the most likely one (--temperature 1 draws)")
    if args.stop_token_ids is None:
        stops, stop_source = stop_ids(
            model_folder.companions or tokenizer_folder, tokenizer.eod, model_folder.config.vocab_size
        )
    else:
        stops, stop_source = args.stop_token_ids, "--stop-token-ids"
    model = load(model_folder, mesh, args.params_dtype)
    (continuation,) = generate(model, [prompt], args.max_new_tokens, sampling, stop_ids=stops, seed=args.seed or 0)
    if rank == 0:
        answer = tokenizer.detokenize(prompt + continuation.tokens)[len(tokenizer.detokenize(prompt)) :]
        print(answer if args.chat else args.prompt + answer)
        mean = torch.tensor(continuation.log_probs).mean().item()
        end = (
            f"ended by {continuation.tokens[-1]}, a stop token of {stop_source}"
            if continuation.stopped
            else "no stop token among them"
        )
        print(
            "\n".join([*notes, f"({len(continuation.tokens)} tokens, {end}; mean log-probability {mean:.3f})"]),
            file=sys.stderr,
        )


def read_prompt(args: argparse.Namespace, tokenizer: HuggingFaceTokenizer) -> tuple[list[int], list[str]]:
    """(ids of the prompt, what to say about its special tokens)."""
    notes, split = [], tokenizer.split_special_tokens
    if spelled := tokenizer.spelled(args.prompt):
        counts = ", ".join(f"{text} {count}" for text, count in spelled.items())
        other = "" if args.chat else f"; --{'no-' * split}split-special-tokens reads {'tokens' if split else 'letters'}"
        notes.append(f"the prompt spells special tokens ({counts}), read as {'letters' if split else 'tokens'}{other}")
    if args.chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}])
        return tokenizer.tokenize(text, add_special_tokens=False), notes
    begins, add = tokenizer.named.get("bos_token"), args.add_special_tokens
    if add is None and begins and not split and args.prompt.startswith(begins):
        add = False
        notes.append(f"the prompt begins with {begins}, so no other is put before it (--add-special-tokens does)")
    return tokenizer.tokenize(args.prompt, add_special_tokens=add), notes


def main(argv: Sequence[str] | None = None) -> None:
    """The whole life of this process."""
    args = parse(argv)
    from minimegatron.launch.rank import run_rank

    run_rank(lambda: continue_prompt(args))
