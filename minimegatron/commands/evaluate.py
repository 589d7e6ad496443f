"""`minimegatron evaluate`: perplexity and bits per byte of texts, multiple choice, and the tasks of lm-eval.

    minimegatron evaluate FOLDER --text held-out.txt                       a text: perplexity, bits per byte
    minimegatron evaluate FOLDER --text held-out.txt --stride 256          each token with more context, for more work
    minimegatron evaluate FOLDER --choices questions.jsonl                 multiple choice by log-probability
    minimegatron evaluate FOLDER --tasks arc_easy,hellaswag --limit 100    tasks of lm-evaluation-harness
    torchrun --standalone --nproc-per-node 2 -m minimegatron evaluate FOLDER --text held-out.txt      2 ranks (tp2)

FOLDER is a downloaded model, or what `--save` of a run named, as for `minimegatron generate`; so are its layouts.
A line of `--choices` is {"question": "7 + 5 =", "choices": ["11", "12"], "answer": 1}. What the figures mean, and how a
text is cut into windows, and what an encoder reads of it, stands in `minimegatron/evaluation/likelihood.py`.

`--tasks` needs `pip install 'minimegatron[eval]'`, and what a task reads: most download a data set. `--include-path`
names a folder of tasks of your own. The numbers are those that lm-eval has of the same weights under transformers.

`--json` prints each result as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.flags import Parser

if TYPE_CHECKING:
    from minimegatron.inference.engine import Engine


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value.
    """
    parser = Parser(
        prog="minimegatron evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    add = parser.add_argument
    add("--text", type=Path, action="append", default=[], metavar="FILE", help="a text; may be repeated")
    add("--choices", type=Path, action="append", default=[], metavar="FILE", help="questions; may be repeated")
    add("--tasks", metavar="NAME,...", help="tasks of lm-eval")
    add("--include-path", metavar="FOLDER", help="for --tasks: a folder with tasks of your own")
    add("--num-fewshot", type=int, metavar="N", help="for --tasks: examples before each question (default: the task's)")
    add("--limit", type=int, metavar="N", help="for --tasks: questions of each (default: all)")
    add("--stride", type=int, metavar="N", help="for --text: tokens that a window predicts (default: all it can)")
    add("--tensor-model-parallel-size", type=int, metavar="N", help="default: all ranks that pp and ep leave")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    add("--expert-model-parallel-size", type=int, default=1, metavar="N", help="default: 1")
    add("--tokenizer-model", type=Path, metavar="FOLDER", help="default: the model's")
    add("--ckpt-step", type=int, metavar="N", help="step of a checkpoint (default: the newest)")
    add("--max-num-seqs", type=int, default=32, metavar="N", help="most texts computed at once (default: 32)")
    add("--params-dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default: fp32)")
    add("--json", action="store_true", help="print results as JSON, a line each")
    args = parser.parse_args(argv)
    if not (args.text or args.choices or args.tasks):
        parser.error("nothing to evaluate: --text FILE, --choices FILE or --tasks NAME")
    if not args.tasks:
        for name in ("include_path", "num_fewshot", "limit"):
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} goes with --tasks")
    return args


def evaluate(args: argparse.Namespace) -> None:
    """Load, compute, and print on rank 0.

    Raises:
        MinimegatronError: no model, text, question or task, or a layout that does not fit.
    """
    from minimegatron.checkpoint.conversion import open_model
    from minimegatron.comm.mesh import Mesh
    from minimegatron.commands.generate import layout
    from minimegatron.data.tokenizer import HuggingFaceTokenizer
    from minimegatron.errors import CheckpointError, DataError
    from minimegatron.evaluation import likelihood
    from minimegatron.inference.answers import compute
    from minimegatron.inference.loading import load
    from minimegatron.launch.rank import init

    rank, world = init()
    model_folder = open_model(args.folder, step=args.ckpt_step)
    mesh = Mesh.build(layout(args, world, model_folder.config))
    folder = args.tokenizer_model or model_folder.tokenizer
    if folder is None:
        raise CheckpointError("there is no tokenizer in it", where=str(args.folder), fix="--tokenizer-model FOLDER")
    tokenizer = HuggingFaceTokenizer(folder, split_special_tokens=False)
    questions = {path: likelihood.read_questions(path) for path in args.choices}
    texts = {}
    for path in args.text:
        try:
            texts[path] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot be read: {error}", where=str(path), fix="a text file in UTF-8") from error
    engine = likelihood.engine_of(load(model_folder, mesh, args.params_dtype), args.max_num_seqs)
    rows = likelihood.Rows(model_folder.config, engine.max_model_len)
    asked = {path: likelihood.text_requests(text, tokenizer, rows, args.stride) for path, text in texts.items()}
    asked |= {path: likelihood.question_requests(each, tokenizer, rows) for path, each in questions.items()}
    found = iter(compute(engine, [request for each in asked.values() for request in each], tokenizer, []))
    if rank == 0:
        for path, requests in asked.items():
            values = [likelihood.Likelihood.of(next(found)[0]) for _ in requests]
            text = path in texts
            report = (
                likelihood.text_report(values, texts[path])
                if text
                else likelihood.question_report(questions[path], values)
            )
            how = f", windows of {rows.room - 1} tokens, {args.stride or rows.most} predicted"
            how += " by the decoder, those before them in the encoder" * rows.halves
            show(str(path), report, how * text, args.json)
    if args.tasks:
        run_tasks(args, engine, tokenizer, rank)


def run_tasks(args: argparse.Namespace, engine: Engine, tokenizer: Any, rank: int) -> None:
    """The tasks of lm-eval.

    Raises:
        ConfigError: lm-eval is missing, or there is no such task.
    """
    from minimegatron.errors import ConfigError

    try:
        from minimegatron.evaluation.lm_eval import tasks_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"--tasks: {error}", fix="pip install 'minimegatron[eval]'") from error

    for task, report in tasks_of(
        engine, tokenizer, args.tasks.split(","), args.include_path, args.num_fewshot, args.limit
    ).items():
        if rank == 0:
            show(task, report, "", args.json)


def show(name: str, report: dict[str, float], more: str, as_json: bool) -> None:
    """Print one result."""
    if as_json:
        print(json.dumps({"name": name, **report}))
        return
    shown = ", ".join(
        f"{key} {value:,.0f}" if key in ("tokens", "bytes", "questions") else f"{key} {value:.4f}"
        for key, value in report.items()
    )
    print(f"{name}: {shown}{more}")


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate.

    Raises:
        MinimegatronError: see `evaluate`.
    """
    args = parse(sys.argv[1:] if argv is None else argv)
    from minimegatron.launch.rank import run_rank

    run_rank(lambda: evaluate(args))
