"""`minimegatron report`: one page about a whole run, in one HTML file that needs nothing else.

    minimegatron report runs/speedrun                                     writes runs/speedrun/report.html
    minimegatron report runs/speedrun --cluster h100 --world-size 8       and what its trainings would take there
    minimegatron report runs/speedrun --price 0.05 --gpu-price 2.5        and what it all costs

FOLDER has what the commands of a run have written, by these names:

| file                | written by                       | on the page                                              |
|---------------------|----------------------------------|----------------------------------------------------------|
| `*.jsonl`, a log    | `train --log-file`, `sft`, ...   | configuration, curves, throughput; on the cluster: time  |
| `*-tasks.jsonl`     | `evaluate --json`                | bits per byte of texts, accuracy of questions            |
| `*-samples.jsonl`   | `generate --prompts-file`        | prompts and answers                                      |
| `stages.jsonl`      | `examples/speedrun.sh`           | seconds and CPU-seconds of each stage                    |

A run that was stopped and went on has its curve once: of a step that was made twice, the later one counts. The
trainings' times on the cluster are those of `minimegatron plan`: the same configuration in bf16, data parallel.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import io
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minimegatron.config.same_model import unmet
from minimegatron.errors import ConfigError, DataError, MinimegatronError
from minimegatron.flags import Parser
from minimegatron.watch.log import RunLog

PAGE = Path(__file__).with_name("report.html")
SHOWN = {  # section -> fields of a configuration that the page shows
    "model": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups vocab_size "
        "max_position_embeddings position_embedding_type normalization num_experts moe_router_topk"
    ).split(),
    "parallel": (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "sequence_parallel use_distributed_optimizer"
    ).split(),
    "optimizer": (
        "optimizer lr min_lr lr_decay_style lr_warmup_iters weight_decay adam_beta1 adam_beta2 clip_grad"
    ).split(),
    "training": "micro_batch_size global_batch_size train_iters params_dtype seed".split(),
    "data": "data_path corpus seq_length sequence_packing split".split(),
}
MEASURES = {
    "bits per byte": "bits per byte",
    "perplexity": "perplexity of a token",
    "acc": "accuracy",
    "acc_norm": "accuracy by length",
}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; the last line of a run that was killed while it wrote is left out.

    Raises:
        DataError: another line that is no object.
    """
    found: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError(f"{type(value).__name__}, not an object")
            found.append(value)
        except ValueError as error:
            if number < len(lines):
                raise DataError(f"no JSON: {error}", where=f"{path}:{number}", fix="mend or remove the line") from error
    return found


def is_log(path: Path) -> bool:
    """Whether a file begins as the log of a training does: with its configuration."""
    begin = b'{"event": "config"'
    with open(path, "rb") as file:
        return file.read(len(begin)) == begin


def read_log(path: Path) -> RunLog:
    """The whole log of a training (`watch/log`): of a step that was made twice, the later one."""
    log = RunLog(path)
    log.read()
    while log.behind:
        log.read()
    return log


def points(log: RunLog, name: str) -> dict[int, float]:
    """{iteration: number} of a curve; {} without it."""
    return log.columns[name].points if name in log.columns else {}


def tokens(log: RunLog) -> dict[int, float]:
    """Tokens that were read until the end of each iteration."""
    length = int(log.config["data"]["seq_length"])
    return {step: samples * length for step, samples in points(log, "consumed_samples").items()}


# ------------------------------------------------------------------------------------------- parts


def picture(draw: Any) -> str:
    """A figure as SVG inside of an address, so that its names cannot meet those of another figure."""
    buffer = io.BytesIO()
    draw.savefig(buffer, format="svg", bbox_inches="tight")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def curves(log: RunLog) -> str:
    """Loss and norm of the gradient over tokens."""
    from minimegatron.viz.picture import INK, MEASURED_LINE, new_figure, styled

    read, name = tokens(log), next(iter(log.latest["train"]["losses"]))
    with styled():
        figure = new_figure(7.4, 4.2)
        loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        _draw(loss, read, points(log, name), label="training", **MEASURED_LINE)
        if held_out := points(log, f"{name} validation"):
            look = {"marker": "o", "color": "#7a52a8", "markersize": 5, "linestyle": "none"}
            _draw(loss, read, held_out, label="validation", **look)
            loss.legend()
        loss.set_ylabel(f"{name}, nats a token" if name == "lm loss" else name)
        _draw(norm, read, points(log, "grad_norm"), color=INK, linewidth=1)
        norm.set(xlabel="million tokens", ylabel="grad norm\nbefore clipping")
        norm.set_ylim(bottom=0)
    return picture(figure)


def _draw(axes: Any, read: Mapping[int, float], values: Mapping[int, float], **look: Any) -> None:
    """Draw values over the tokens that were read; a step that the log does not have lies between those that it has."""
    import numpy

    steps = [0, *sorted(read)]
    at = numpy.interp(list(values), steps, [read.get(step, 0.0) / 1e6 for step in steps])
    axes.plot(at, list(values.values()), **look)


def facts(log: RunLog) -> dict[str, str]:
    """What a training did, in numbers."""
    last = log.latest["train"]
    found = {
        "steps": f"{last['iteration']:,} of {last.get('train_iters', last['iteration']):,}",
        "tokens": f"{tokens(log)[last['iteration']]:,.0f}",
        "last losses": ", ".join(f"{name} {value:.4f}" for name, value in last["losses"].items()),
    }
    if "validation" in log.latest:
        told = log.latest["validation"]
        each = ", ".join(f"{name} {value:.4f}" for name, value in told["losses"].items())
        found["validation"] = f"{each} at step {told['iteration']:,}"
    if rates := list(points(log, "tokens_per_second").values()):
        found["throughput"] = f"{statistics.median(rates[len(rates) // 10 :]):,.0f} tokens a second (median)"
    if last.get("mfu"):
        found["MFU"] = f"{last['mfu']:.1%}"
    if last.get("peak_memory_bytes"):
        found["peak memory of a rank"] = f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"
    if log.marks:
        found["interrupted"] = f"{len(log.marks)} times, and went on"
    return found


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a configuration that are shown, set, and read by the run."""
    given = {name: value for section in SHOWN for name, value in (config.get(section) or {}).items()}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    found = {}
    for names in SHOWN.values():
        for name in names:
            value = given.get(name)
            if value not in (None, False, "", ()) and not unmet(name, given.get):
                found[name] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return found


def planned(log: RunLog, cluster_name: str, world: int, price: float | None) -> dict[str, str]:
    """The training on a cluster: the same configuration in bf16, as many micro-batches as its batch allows."""
    from minimegatron.planner.cluster import read_cluster
    from minimegatron.planner.planning import plan
    from minimegatron.training.arguments import parse_args

    cluster = read_cluster(cluster_name)
    cluster = cluster if price is None else cluster.replace(price=price)
    sections = {k: v for k, v in log.config.items() if k in ("model", "parallel", "optimizer", "training", "data")}
    # Which tokens it reads changes nothing.
    sections["data"] = {
        key: value for key, value in sections["data"].items() if key in ("seq_length", "sequence_packing")
    }
    batch = int(log.latest["train"]["global_batch_size"])
    ways = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    dp = world // math.prod(int(sections["parallel"].get(name) or 1) for name in ways)
    own, most = batch // max(1, dp), int(sections["training"]["micro_batch_size"])
    micro = next((n for n in range(min(most, own), 0, -1) if own % n == 0), most)
    flags = ["--bf16", "--global-batch-size", str(batch), "--micro-batch-size", str(micro), "--mock-data"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(sections))
        run = parse_args(["--config", str(path), *flags], world, reads=False)
    told = plan(run, world, cluster)
    if told.time is None:
        return {"time": f"not predicted: {', '.join(told.unknown)}"}
    seconds = told.time.seconds
    read = max(tokens(log).values())
    steps = read / told.tokens_a_step()
    found = {
        "a step": f"{1e3 * seconds:.2f} ms, MFU {told.time.mfu:.1%} of the dense bf16 peak",
        "the training": duration(seconds * steps),
        "memory": f"{told.bytes / 2**30:.2f} GiB of {cluster.usable / 2**30:.0f} on a GPU",
    }
    if cluster.price:
        cost = told.cost(read)
        found["cost"] = f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}"
        found["cost"] += f" at {cluster.price:g} a GPU and hour"
    return found


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def stage_rows(stages: Sequence[Mapping[str, Any]], price: float | None) -> list[list[str]]:
    """A row a stage: name, time, CPU time, cost; and one for all."""
    rows = []
    each = [(str(s["stage"]), float(s["seconds"]), float(s.get("user", 0)) + float(s.get("system", 0))) for s in stages]
    for name, seconds, cpu in [*each, ("all", sum(s for _, s, _ in each), sum(c for *_, c in each))]:
        cost = [] if price is None else [f"{seconds / 3600 * price:,.4f}"]
        rows.append([name, duration(seconds), f"{cpu:,.0f}", *cost])
    return rows


def task_rows(files: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row for a text or a file of questions, a column for each model."""
    models = [name.removesuffix("-tasks") for name in files]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for model, lines in zip(models, files.values(), strict=True):
        for line in lines:
            for key, words in MEASURES.items():
                if key in line:
                    shown = f"{line[key]:.4f}"
                    if (error := line.get(f"{key}_stderr")) is not None:
                        shown += f" ± {error:.4f}"
                    rows.setdefault((Path(str(line["name"])).stem, words), {})[model] = shown
    return ["", "", *models], [[*key, *(values.get(m, "") for m in models)] for key, values in rows.items()]


def machine() -> str:
    """This machine, in words."""
    import torch

    import minimegatron

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.machine()
    if os.path.isfile("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    where = f"{len(devices)} x {devices[0]}" if devices else f"{cores} cores of {model}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{where}; minimegatron {minimegatron.__version__}, {versions}"


# -------------------------------------------------------------------------------------- the command


def page(args: argparse.Namespace) -> str:
    """The page.

    Raises:
        DataError: nothing to report, or a damaged file.
        ConfigError: matplotlib is not installed, or there is no such cluster.
    """
    import jinja2

    paths = sorted(args.folder.glob("*.jsonl"))
    logs = {path.stem: read_log(path) for path in paths if is_log(path)}
    logs = {name: log for name, log in logs.items() if "train" in log.latest}
    files = {path.stem: lines_of(path) for path in paths if path.stem not in logs}
    tasks = {name: lines for name, lines in files.items() if name.endswith("-tasks")}
    samples = {name.removesuffix("-samples"): lines for name, lines in files.items() if name.endswith("-samples")}
    if not (logs or tasks or samples):
        raise DataError(
            "nothing to report: no log of a training, no tasks, no samples",
            where=str(args.folder),
            fix="a folder as the table of `minimegatron report --help` says, e.g. of examples/speedrun.sh",
        )
    made = [stage.get("stage") for stage in files.get("stages", [])]
    place = {
        name: (made.index(name) if name in made else len(made), -max(tokens(logs[name]).values())) for name in logs
    }
    trainings = []
    for name in sorted(logs, key=place.__getitem__):
        log = logs[name]
        try:
            told = planned(log, args.cluster, args.world_size, args.gpu_price) if args.cluster else {}
        except MinimegatronError as error:
            told = {"not planned": error.what}
        trainings.append(
            {
                "name": name,
                "facts": facts(log),
                "settings": settings(log.config),
                "told": told,
                "curve": curves(log),
            }
        )
    header, rows = task_rows(tasks)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        title=args.folder.resolve().name,
        machine=machine(),
        made=now,
        stages=stage_rows(files.get("stages", []), args.price) if files.get("stages") else [],
        price=args.price,
        trainings=trainings,
        cluster=f"{args.world_size} x {args.cluster}",
        task_header=header,
        task_rows=rows,
        samples=samples,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page.

    Raises:
        MinimegatronError: see `page`.
    """
    parser = Parser(
        prog="minimegatron report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="default: report.html in the folder")
    add("--cluster", metavar="NAME|FILE", help="a cluster of `minimegatron plan`: what the trainings would take there")
    add("--world-size", type=int, default=8, metavar="N", help="its GPUs (default: %(default)s)")
    add("--price", type=float, metavar="X", help="of this machine for an hour")
    add("--gpu-price", type=float, metavar="X", help="of a GPU of the cluster for an hour")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if not args.folder.is_dir():
        raise DataError("no such folder", where=str(args.folder), fix="the folder of a run")
    try:
        text = page(args)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the page has pictures: {error}", fix="pip install matplotlib") from error
    out = args.out or args.folder / "report.html"
    out.write_text(text, encoding="utf-8")
    print(f"{out}: open it in a browser; it needs no other file")
