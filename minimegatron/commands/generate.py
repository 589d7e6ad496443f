"""`minimegatron generate`: continue prompts with a published model, or with a checkpoint of a run.

    minimegatron generate FOLDER "Once upon a time" --max-new-tokens 50 --temperature 0.8 --top-p 0.95
    minimegatron generate FOLDER "Who are you?" --chat                                              a question
    minimegatron generate FOLDER --prompts-file prompts.txt --n 4 --temperature 1 > answers.jsonl   many prompts
    minimegatron generate FOLDER "Name a town." --chat --json-schema town.json                      an answer in JSON
    torchrun --standalone --nproc-per-node 2 -m minimegatron generate FOLDER "Once upon a time"     2 ranks (tp2)

FOLDER is a downloaded model (`config.json`, its weights in `*.safetensors`, and `tokenizer.json`), or what `--save` of
a run named: then `--tokenizer-model` says where the tokenizer is, unless the folder came from a published model.
Nothing is downloaded here. Each rank reads its part of every matrix.

**Layout.** By default all ranks are one tensor-parallel group; `--tensor-model-parallel-size`,
`--pipeline-model-parallel-size` and `--expert-model-parallel-size` choose another layout. If more ranks are left, they
are replicas, among which the prompts are divided.

**Sampling.** With any of `--temperature`, `--top-k`, `--top-p` and `--min-p` tokens are drawn; without them decoding is
greedy. Penalties apply in both cases. A draw depends only on `--seed`, the number of its prompt and answer, and its
position.

**Special tokens** in a prompt (`<|im_start|>`) are read as tokens, since the prompt may come from a chat template;
`--split-special-tokens` reads them as plain text. The tokenizer's beginning of a text (Llama's `<s>`) is added unless
the prompt has it. `--chat` puts the prompt into the model's chat template as a user's message, and prints the answer
alone.

**An answer ends** with a stop id: `eos_token_id` of `generation_config.json`, else of `config.json`, else the
tokenizer's end of document; `--stop-token-ids` replaces these. It also ends before a text given by `--stop`.

**JSON.** With `--json-schema` every answer is JSON of that schema (`inference/grammar`, package `llguidance`), unless
`--max-new-tokens` or `--stop` cuts it.

**Output.** One answer to one prompt is printed as text. With `--prompts-file` (a prompt in each line, or in a `.jsonl`
file the "prompt" of each line), `--n` or `--log-probs` each answer is a line of JSON, in the order of the prompts:

    {"prompt": ..., "index": 0, "text": ..., "tokens": [...], "finish_reason": "stop" or "length", "stop_reason": ...,
     "log_probs": [...], "top_log_probs": [[[id, log-probability], ...], ...]}                the last two where asked
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.commands.prompts import read_prompt, read_prompts
from minimegatron.commands.speculation import add_speculative_config, load_draft, speculative_of
from minimegatron.flags import Parser

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import ParallelConfig, TransformerConfig
    from minimegatron.inference.engine import Engine
    from minimegatron.inference.grammar import Grammars
    from minimegatron.inference.sampling import SamplingParams
    from minimegatron.inference.sequence import Request
    from minimegatron.inference.speculative import SpeculativeConfig


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value, or two that contradict each other.
    """
    parser = Parser(
        prog="minimegatron generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt", nargs="?")
    add, yes_or_no = parser.add_argument, argparse.BooleanOptionalAction
    add("--prompts-file", type=Path, metavar="FILE", help='a prompt a line; .jsonl: the "prompt" of each line')
    add("--tensor-model-parallel-size", type=int, metavar="N", help="default: all ranks that pp and ep leave")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    add("--expert-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    add("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    add("--ckpt-step", type=int, metavar="N", help="step of a checkpoint (default: the newest)")
    add("--max-new-tokens", type=int, default=50, metavar="N", help="most new tokens of an answer (default: 50)")
    add("--temperature", type=float, metavar="T", help="draw from softmax(logits / T)")
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens; 0: all, 1: greedy")
    add("--top-p", type=float, metavar="P", help="draw from the most likely tokens with a mass of P; 0 or 1: all")
    add("--min-p", type=float, metavar="P", help="draw from tokens at least P times as likely as the most likely one")
    add("--repetition-penalty", type=float, metavar="P", help="divide logits of tokens that have occurred by P")
    add("--presence-penalty", type=float, metavar="P", help="subtract P from logits of tokens in the answer")
    add("--frequency-penalty", type=float, metavar="P", help="subtract P from them for each occurrence")
    add("--n", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    add("--seed", type=int, metavar="N", help="of the draws (default: 0)")
    add("--chat", action="store_true", help="put the prompt into the chat template as a user's message")
    split = "read special tokens in the prompt as plain text (default: as tokenizer_config.json says, else as tokens)"
    add("--split-special-tokens", action=yes_or_no, help=split)
    begins = "begin as the tokenizer does, e.g. with <s> (default: unless the prompt does, and not with --chat)"
    add("--add-special-tokens", action=yes_or_no, help=begins)
    stop = "ids that end an answer; without an id none does (default: those in the model's files)"
    add("--stop-token-ids", type=int, nargs="*", metavar="N", help=stop)
    add("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be repeated")
    schema = "answers are JSON of this schema, in a file or as text that begins with {"
    add("--json-schema", metavar="FILE|JSON", help=schema)
    add("--log-probs", type=int, metavar="K", help="print those of each token and of the K most likely ones")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="most answers computed at once (default: 64)")
    graph = "record decode steps as CUDA graphs (default: on a GPU, with tp = pp = ep = 1)"
    add("--cuda-graph", action=yes_or_no, help=graph)
    add("--compiled", action="store_true", help="torch.compile decode steps, which takes a minute at the start")
    add("--params-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default: fp32)")
    add_speculative_config(parser)
    args = parser.parse_args(argv)
    if args.chat and (args.split_special_tokens or args.add_special_tokens is not None):
        flag = "--split-special-tokens" if args.split_special_tokens else "--add-special-tokens"
        parser.error(f"{flag} with --chat: the template spells all special tokens itself; drop one of the two")
    if (args.prompt is None) == (args.prompts_file is None):
        parser.error("a prompt or --prompts-file FILE, one of the two")
    if "" in args.stop:
        parser.error("--stop '' would end every answer before it begins; leave it out")
    return args


DRAW = ("temperature", "top_k", "top_p", "min_p")
PENALISE = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters given; greedy without temperature, top_k, top_p and min_p.

    Raises:
        ConfigError: a value out of range.
    """
    from minimegatron.inference.sampling import SamplingParams

    given = {name: getattr(args, name) for name in DRAW + PENALISE if getattr(args, name) is not None}
    return SamplingParams(**given) if given.keys() & set(DRAW) else SamplingParams(top_k=1, **given)


def grammar_of(schema: str | None) -> str:
    """The grammar of `--json-schema`; "" for none.

    Raises:
        ConfigError: it is no JSON object, or the package llguidance is missing.
        DataError: the file cannot be read.
    """
    from minimegatron.errors import ConfigError, DataError
    from minimegatron.inference.grammar import llguidance, of_json_schema

    if schema is None:
        return ""
    llguidance()
    where = "--json-schema"
    if not schema.lstrip().startswith("{"):
        where = f"--json-schema {schema}"
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fix = "a file of UTF-8 text, or the schema itself, which begins with {"
            raise DataError(f"no schema can be read: {error}", where=where, fix=fix) from error
    try:
        found = json.loads(schema)
    except ValueError as error:
        raise ConfigError(f"the schema is no JSON: {error}", where=where, fix='such as {"type": "object"}') from error
    if not isinstance(found, dict):
        what = f"the schema is a JSON {type(found).__name__}, and no object"
        raise ConfigError(what, where=where, fix='such as {"type": "object"}')
    return of_json_schema(found)


def layout(args: argparse.Namespace, world: int, model: TransformerConfig) -> ParallelConfig:
    """The layout of the ranks.

    Raises:
        ConfigError: the layout does not divide the world or the model.
    """
    from minimegatron.config import ParallelConfig
    from minimegatron.config.fits import check_model_fits

    pp, ep = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    tp = args.tensor_model_parallel_size or max(1, world // max(1, pp * ep))
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1 and any(model.expert_layers),
    )
    parallel.data_parallel_size(world)
    check_model_fits(model, parallel)
    return parallel


def continue_prompt(args: argparse.Namespace) -> None:
    """Load, generate, and print on rank 0.

    Raises:
        MinimegatronError: the folder has no model, or the model cannot generate in this layout.
    """
    from minimegatron.checkpoint.companions import stop_ids
    from minimegatron.checkpoint.conversion import open_model
    from minimegatron.checkpoint.packed import memory
    from minimegatron.comm.mesh import Mesh
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.errors import CheckpointError
    from minimegatron.inference.answers import compute, ending
    from minimegatron.inference.grammar import Grammars
    from minimegatron.inference.loading import load
    from minimegatron.inference.sequence import FinishReason, Request
    from minimegatron.launch.rank import init

    sampling, grammar = sampling_params(args), grammar_of(args.json_schema)
    rank, world = init()
    model_folder = open_model(args.folder, step=args.ckpt_step)
    mesh = Mesh.build(layout(args, world, model_folder.config))
    tokenizer_folder = args.tokenizer_model or model_folder.tokenizer
    if tokenizer_folder is None:
        raise CheckpointError(
            "there is no tokenizer in it", where=str(args.folder), fix="--tokenizer-model FOLDER names one"
        )
    tokenizer = HuggingFaceTokenizer(
        tokenizer_folder, split_special_tokens=False if args.chat else args.split_special_tokens
    )
    texts = [args.prompt] if args.prompts_file is None else read_prompts(args.prompts_file)
    prompts, said = zip(
        *(read_prompt(text, tokenizer, chat=args.chat, add_special_tokens=args.add_special_tokens) for text in texts),
        strict=True,
    )
    notes = [*dict.fromkeys(note for each in said for note in each)]
    if args.seed is not None and sampling.greedy:
        notes.append(f"--seed {args.seed} changes nothing: every token is the most likely one (--temperature 1 draws)")
    if args.n > 1 and sampling.greedy:
        notes.append(f"--n {args.n} gives equal answers: every token is the most likely one (--temperature 1 draws)")
    if args.stop_token_ids is None:
        stops, stop_source = stop_ids(
            model_folder.companions or tokenizer_folder, tokenizer.eod, model_folder.config.vocab_size
        )
    else:
        stops, stop_source = args.stop_token_ids, "--stop-token-ids"
    requests = [
        Request(
            tuple(model_folder.config.prompt_of(prompt, tokenizer.eod)),
            args.max_new_tokens,
            sampling,
            frozenset(stops),
            seed=(args.seed or 0) + (i << 32),
            n=args.n,
            log_probs=args.log_probs or 0,
            grammar=grammar,
        )
        for i, prompt in enumerate(prompts)
    ]
    grammars = Grammars(tokenizer, model_folder.config.vocab_size)
    if grammar:
        grammars.check(grammar)  # before the weights are read
    speculative, draft = speculative_of(args.speculative_config, model_folder.config)
    model = load(model_folder, mesh, args.params_dtype)
    if model_folder.words is not None:
        notes.append(f"({memory(model)})")
    draft_model = load_draft(draft, mesh, args.params_dtype)
    engine = engine_for(args, model, mesh, requests, notes, speculative, draft_model, grammars)
    began = time.monotonic()
    found = compute(engine, requests, tokenizer, args.stop)
    if rank != 0:
        return
    if speculative is not None:
        notes.append(f"{engine.accepted_tokens} of {engine.proposed_tokens} proposed tokens were accepted")
    answers = [answer for several in found for answer in several]
    ends = [ending(answer, tokenizer, args.stop) for answer in answers]
    if args.prompts_file is None and args.n == 1 and args.log_probs is None:
        ((text, stop),) = ends
        print(text if args.chat or answers[0].source else texts[0] + text)
        (answer,) = answers
        if stop is None and answer.reason is FinishReason.STOP:
            end = "whole: the schema allows no more"
        elif isinstance(stop, str):
            end = f"ended before {stop!r} (--stop)"
        else:
            end = "no stop token among them" if stop is None else f"ended by {stop}, a stop token of {stop_source}"
        mean = sum(answer.log_probs) / len(answer.log_probs)
        notes.append(f"({len(answer.answer)} tokens, {end}; mean log-probability {mean:.3f})")
    else:
        for answer, (text, stop) in zip(answers, ends, strict=True):
            line = {
                "prompt": texts[int(answer.request_id)],
                "index": answer.index,
                "text": text,
                "tokens": answer.answer,
                "finish_reason": "length" if stop is None and answer.reason is not FinishReason.STOP else "stop",
                "stop_reason": stop,
            }
            if args.log_probs is not None:
                line |= {"log_probs": answer.log_probs, "top_log_probs": answer.top}
            print(json.dumps(line, ensure_ascii=False))
        tokens, seconds = sum(len(answer.answer) for answer in answers), time.monotonic() - began
        notes.append(f"({len(answers)} answers to {len(texts)} prompts, {tokens} tokens in {seconds:.1f} s)")
    print("\n".join(notes), file=sys.stderr)


def engine_for(
    args: argparse.Namespace,
    model: Any,
    mesh: Mesh,
    requests: Sequence[Request],
    notes: list[str],
    speculative: SpeculativeConfig | None = None,
    draft: Any = None,
    grammars: Grammars | None = None,
) -> Engine:
    """An engine with pages for the answers that run at once.

    Args:
        args: of `parse`.
        model, mesh: the model, and its layout.
        requests: all requests.
        notes: gets a line if a GPU's decode steps are not recorded.
        speculative, draft: see `Engine`.

    Raises:
        ConfigError: the model cannot generate, or cannot be recorded or compiled as asked.
    """
    from minimegatron.cuda_graphs import CudaRecorder
    from minimegatron.errors import ConfigError
    from minimegatron.inference.engine import Engine, EngineConfig, batched_tokens
    from minimegatron.inference.runner import check_can_record

    graph = args.cuda_graph
    if graph is None and mesh.device.type == "cuda":
        try:
            check_can_record(model)
            graph = speculative is None or speculative.method != "mtp"
        except ConfigError as error:
            notes.append(f"no CUDA graphs: {error.what}")
    size = EngineConfig.page_size
    longest = max(len(request.prompt) for request in requests) + args.max_new_tokens
    count = max(1, args.n, min(args.max_num_seqs, args.n * len(requests)))
    config = EngineConfig(
        num_pages=count * -(-longest // size),
        max_num_seqs=count,
        max_num_batched_tokens=batched_tokens(
            model, count * (1 + (speculative.num_speculative_tokens if speculative else 0)), longest
        ),
        speculative=speculative,
    )
    recorder = CudaRecorder(mesh.device) if graph else None
    return Engine(model, config, recorder=recorder, compiled=args.compiled, draft=draft, grammars=grammars)


def main(argv: Sequence[str] | None = None) -> None:
    """The main function of this process."""
    args = parse(argv)
    from minimegatron.launch.rank import run_rank

    run_rank(lambda: continue_prompt(args))
