"""The lines of the log: one a step from rank 0, in Megatron's own format.

    iteration        1/     100 | consumed samples:            8 | elapsed time per iteration (ms): 61.5 | ...

Ranks sum their losses first (`training/step`), rank 0 prints, and the same numbers go to every sink
(`training/observers/sinks`).

With `--log-interval k` the loss, time and throughput of a line are means over its k steps. A step that was skipped
(fp16 overflow), or whose loss is not finite, is counted as such and is not in the mean.

TFLOP/s and MFU count model FLOPs with the causal half of attention against the dense bf16 peak (`training/flops`);
MFU is printed if the peak of the device is known and the model computes in 16 bits, and the banner names that peak.
Peak memory is what rank 0 allocated on its GPU, or its resident set on a CPU.

The log file has more: the time, samples/s, the epoch of each part of the data, memory now, and by owner, and what other
observers add to a line (`add`: norms by layer) or write as an object of its own (`write`: a timeline, counted memory).

Megatron-LM: `training_log` and `evaluate_and_print_results` in `megatron/training/training.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Dataset
from minimegatron.layers.moe.balance import imbalance
from minimegatron.layers.moe.placement import WINDOW, summarise, summary_record, summary_tags, table
from minimegatron.training.flops import peak_tflops, step_flops
from minimegatron.training.observers import Observer, Step
from minimegatron.training.observers.sinks import Sink, open_sinks
from minimegatron.training.reports import StepReport

OWNERS_EVERY = 100  # lines; to look for all tensors that last takes milliseconds
LARGEST_EXPONENT = 20.0  # perplexity is exp(loss); Megatron stops it here so that a bad start prints a number


def memory_bytes(device: torch.device) -> int | None:
    """The memory of this rank now: allocated on its GPU, or resident on a CPU; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Metrics(Observer):
    """Collects steps, prints a line every `log_interval` of them, and feeds the sinks.

    Args:
        run: the configuration, with where to log.
        train_iters: steps of the run.
        mesh: the ranks; rank 0 prints.
        quiet: no rank prints.

    Raises:
        ConfigError: a log file that cannot be written.
    """

    def __init__(self, run: RunConfig, train_iters: int, mesh: Mesh, quiet: bool = False) -> None:
        self.model = run.model
        self.seq_length = run.data.seq_length
        self.log_interval = run.training.log_interval
        self.train_iters = train_iters
        self.world_size = mesh.world.size
        self.device = mesh.device
        self.expert_ranks = mesh.ep.size
        self.speaks = mesh.rank == 0 and not quiet
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.peak = peak_tflops(self.device_name) if run.model.params_dtype != "fp32" else None
        machine = {"world_size": self.world_size, "device": self.device.type, "device_name": self.device_name}
        machine |= {"peak_tflops": self.peak, "train_iters": train_iters, "time": time.time()}
        self.sinks: list[Sink] = []
        self.sinks = open_sinks(run, self._print, machine) if self.speaks else []
        self.more_tags: Callable[[], dict[str, float]] = dict  # of every line, for the sinks
        self.epochs: Callable[[int], dict[str, float]] = lambda samples: {}  # {name: epochs that so many samples are}
        self.owners: Callable[[], dict[str, int]] = dict  # {owner: bytes that last from step to step}
        self._added: dict[str, Any] = {}
        self._owned: dict[str, int] = {}
        self.lines = 0
        self.recent: deque[StepReport] = deque(maxlen=WINDOW)
        self.ended: dict[str, Any] = {}
        self._forget()

    @functools.cached_property
    def sample_flops(self) -> float:
        """Model FLOPs of a sample, forward and backward."""
        return step_flops(self.model, 1, self.seq_length)

    def say(self, text: str) -> None:
        """Print a line, on the rank that prints; the log file gets it, too."""
        self._print(text)
        self.write({"event": "message", "time": time.time(), "text": text})

    def _print(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def add(self, found: dict[str, Any]) -> None:
        """Add fields to the next line of the log, for the sinks; `params_norm` is printed, too."""
        self._added |= found

    def log(self, tags: dict[str, float], record: dict[str, Any], iteration: int) -> None:
        """Hand numbers to every sink, on the rank that prints."""
        for sink in self.sinks:
            sink.log(tags, record, iteration)

    def write(self, record: dict[str, Any]) -> None:
        """Write an object of its own to the log file alone; its `event` is a name."""
        self.log({}, record, record.get("iteration", 0))

    def _forget(self) -> None:
        self.steps = self.counted = self.skipped = self.nan = self.samples = 0
        self.seconds = 0.0
        self.sums: dict[str, float] = {}

    def after_step(self, step: Step) -> None:
        if step.report is not None:
            self.recent.append(step.report)
            self.step(step.report, step.iteration, step.consumed_samples, step.batch_size, step.seconds)

    def end(self, done: int, reason: str) -> None:
        self.experts(list(self.recent), done)
        if reason:
            self.say(f"exiting program at iteration {done}: {reason}")
        self.ended = {"event": "end", "time": time.time(), "iteration": done, "reason": reason}

    def step(self, report: StepReport, iteration: int, consumed_samples: int, batch_size: int, seconds: float) -> None:
        """Count a step; print when the interval is full.

        Args:
            report: the step's report.
            iteration: its number, from 1.
            consumed_samples: samples of all steps up to and including this one.
            batch_size: its samples, over all ranks.
            seconds: its wall time.
        """
        self.steps += 1
        self.seconds += seconds
        self.samples += batch_size
        finite = all(math.isfinite(value) for value in report.losses.values())
        self.nan += not finite
        self.skipped += report.skipped
        if finite and not report.skipped:
            self.counted += 1
            for name, value in report.losses.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
        if iteration % self.log_interval == 0:
            self._report(report, iteration, consumed_samples, batch_size)
            self._forget()

    def _report(self, last: StepReport, iteration: int, consumed_samples: int, batch_size: int) -> None:
        if not self.speaks:
            return
        flops = self.samples * self.sample_flops / self.seconds / self.world_size
        if self.lines % OWNERS_EVERY < 2:  # after the first step, and the second, nothing comes that lasts
            self._owned = self.owners()
        self.lines += 1
        record: dict[str, Any] = {
            "event": "train",
            "time": time.time(),
            "iteration": iteration,
            "train_iters": self.train_iters,
            "consumed_samples": consumed_samples,
            "elapsed_ms": 1000 * self.seconds / self.steps,
            "tflops_per_gpu": flops / 1e12,
            "learning_rate": last.learning_rate,
            "global_batch_size": batch_size,
            "losses": {name: total / self.counted for name, total in self.sums.items()},
            "loss_scale": last.loss_scale,
            "grad_norm": last.grad_norm,
            "num_zeros": last.num_zeros,
            "skipped_iterations": self.skipped,
            "nan_iterations": self.nan,
            "tokens_per_second": self.samples * self.seq_length / self.seconds,
            "samples_per_second": self.samples / self.seconds,
            "epochs": self.epochs(consumed_samples),
            "counted_tokens": last.num_tokens,
            "memory_bytes": memory_bytes(self.device),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "memory_by_owner": self._owned,
            "mfu": flops / 1e12 / self.peak if self.peak else None,
            "experts": [dataclasses.asdict(layer) for layer in last.experts],
            "expert_ranks": self.expert_ranks,
            **self._added,
        }
        self._added = {}
        self._print(format_step(record))
        self.log(step_tags(record) | self.more_tags(), record, iteration)

    def validation(self, losses: dict[str, float], iteration: int, split: str = "validation", where: str = "") -> None:
        """Print the losses of an evaluation as Megatron does, and feed the sinks.

        Args:
            losses: name -> mean over the tokens of the split.
            iteration: the step after which it was evaluated.
            split: `validation` or `test`.
            where: printed after the iteration, e.g. "on test set".
        """
        if not self.speaks:
            return
        line = format_validation(losses, f"iteration {iteration} {where}".rstrip())
        self._print(f"{'-' * len(line)}\n{line}\n{'-' * len(line)}")
        record = {"event": split, "iteration": iteration, "losses": losses}
        tags = {f"{name} {split}": value for name, value in losses.items()}
        tags |= {f"{name} {split} ppl": perplexity(value) for name, value in losses.items() if of_tokens(name)}
        self.log(tags, record, iteration)

    def experts(self, reports: Sequence[StepReport], iteration: int) -> None:
        """Print how evenly experts were loaded in these steps (`layers/moe/placement`); nothing without experts."""
        if not self.speaks or not any(report.experts for report in reports):
            return
        loads = summarise([r.experts for r in reports], self.expert_ranks, self.model.moe_router_num_groups)
        self._print(table(loads))
        if trace.recording():
            now = time.monotonic()
            trace.emit("experts", "mark", now, now, note=table(loads))
        self.log(summary_tags(loads), {"iteration": iteration, **summary_record(loads)}, iteration)

    def close(self) -> None:
        if self.ended:  # the last line: after the evaluation at the end, and the save
            self.write(self.ended)
        for sink in self.sinks:
            sink.close()


def perplexity(loss: float) -> float:
    """exp(loss), the equivalent number of equally likely next tokens; the exponent is capped at 20 as in Megatron."""
    return math.exp(min(LARGEST_EXPONENT, loss))


def of_tokens(name: str) -> bool:
    """Whether a report is a cross entropy of tokens, which has a perplexity."""
    return name == "lm loss" or name.startswith("mtp")


def format_step(record: dict[str, Any]) -> str:
    """Megatron's log line: its fields in its order and format, then tokens/s, MFU and memory."""
    fields = [
        f"iteration {record['iteration']:8d}/{record['train_iters']:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['elapsed_ms']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_short(record['tflops_per_gpu'])}",
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {record['global_batch_size']:5d}",
        *(f"{name}: {value:.6E}" for name, value in record["losses"].items()),
        f"loss scale: {record['loss_scale']:.1f}",
    ]
    if record["grad_norm"] is not None:
        fields.append(f"grad norm: {record['grad_norm']:.3f}")
    if record["num_zeros"] is not None:
        fields.append(f"num zeros: {record['num_zeros']}")
    if record.get("params_norm") is not None:
        fields.append(f"params norm: {record['params_norm']:.3f}")
    fields.append(f"number of skipped iterations: {record['skipped_iterations']:3d}")
    fields.append(f"number of nan iterations: {record['nan_iterations']:3d}")
    fields.append(f"tokens/s: {record['tokens_per_second']:.0f}")
    fields += [f"{name}: {value:.6E}" for name, value in penalties(record).items()]
    if record["experts"]:
        fields.append(f"busiest expert: {max(imbalance(layer['tokens']) for layer in record['experts']):.2f} x mean")
        if record["expert_ranks"] > 1:
            fields.append(f"busiest rank: {max(rank_imbalances(record)):.2f} x mean")
    if record["mfu"] is not None:
        fields.append(f"MFU: {100 * record['mfu']:.1f} %")
    fields.append(f"peak memory (GB): {record['peak_memory_bytes'] / 1e9:.2f}")
    return " " + " | ".join(fields) + " |"


def format_validation(losses: dict[str, float], where: str) -> str:
    """` validation loss at iteration 100 | lm loss value: 5.1E+00 | lm loss PPL: 1.6E+02 |`"""
    fields = [f" validation loss at {where}"]
    for name, value in losses.items():
        fields.append(f"{name} value: {value:.6E}")
        fields += [f"{name} PPL: {perplexity(value):.6E}"] if of_tokens(name) else []
    return " | ".join(fields) + " |"


def step_tags(record: dict[str, Any]) -> dict[str, float]:
    """The record under Megatron's TensorBoard tags."""
    tags = {
        "learning-rate": record["learning_rate"],
        "batch-size": record["global_batch_size"],
        "loss-scale": record["loss_scale"],
        "iteration-time": record["elapsed_ms"] / 1000,
        "throughput": record["tflops_per_gpu"],
        "tokens-per-second": record["tokens_per_second"],
        "samples-per-second": record["samples_per_second"],
        "mem-max-allocated-bytes": record["peak_memory_bytes"],
        **record["losses"],
        **penalties(record),
        **load_tags(record),
        **norm_tags(record),
    }
    for name, spent in record.get("sections", {}).items():
        tags |= {f"time/{name} min": spent[0], f"time/{name} max": spent[1]}
    epochs = record["epochs"]
    tags |= {"epoch" if len(epochs) == 1 else f"epoch/{name}": value for name, value in epochs.items()}
    optional = {"grad-norm": "grad_norm", "num-zeros": "num_zeros", "mfu": "mfu", "params-norm": "params_norm"}
    optional |= {"mem-bytes": "memory_bytes"}
    return tags | {tag: value for tag, key in optional.items() if (value := record.get(key)) is not None}


def norm_tags(record: dict[str, Any]) -> dict[str, float]:
    """For each layer the norm of its gradient before clipping, of its weights, and its update over its weights."""
    kinds = ("grad-norm", "params-norm", "update-ratio")
    layers = record.get("norms", {}).items()
    named = {f"{kind}/{layer}": n for layer, norms in layers for kind, n in zip(kinds, norms, strict=True)}
    return {tag: value for tag, value in named.items() if value is not None}


def penalties(record: dict[str, Any]) -> dict[str, float]:
    """The routers' losses of the last step, means over layers, under Megatron's names and without their weights."""
    layers = [layer["penalties"] for layer in record["experts"]]
    names = layers[0] if layers else {}
    return {name: sum(layer[name] for layer in layers) / len(layers) for name in names}


def rank_imbalances(record: dict[str, Any]) -> list[float]:
    """For each layer the tokens sent to the busiest rank's experts, over the mean of the ranks of ep."""
    ranks = record["expert_ranks"]
    each = [len(layer["tokens"]) // ranks for layer in record["experts"]]
    return [
        imbalance([sum(layer["tokens"][r * n : (r + 1) * n]) for r in range(ranks)])
        for layer, n in zip(record["experts"], each, strict=True)
    ]


def load_tags(record: dict[str, Any]) -> dict[str, float]:
    """For each layer the load of each expert over the mean, that of the busiest expert and rank, and the share
    dropped."""
    tags: dict[str, float] = {}
    for layer in record["experts"]:
        total = max(sum(layer["tokens"]), 1)
        where = f"experts/layer {layer['layer']}"
        tags |= {f"{where}/load {e}": n * len(layer["tokens"]) / total for e, n in enumerate(layer["tokens"])}
        tags |= {f"{where}/imbalance": imbalance(layer["tokens"]), f"{where}/dropped": layer["dropped"] / total}
    if record["expert_ranks"] > 1:
        names = [f"experts/layer {layer['layer']}/rank imbalance" for layer in record["experts"]]
        tags |= dict(zip(names, rank_imbalances(record), strict=True))
    return tags


def _short(value: float) -> str:
    """412.3 as Megatron prints it; 0.0123 if one decimal would show 0.0 (on a laptop)."""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


class EpochLines(Observer):
    """Prints a line when an epoch begins, except for the first; if several begin in an interval of the log, for the
    last.

    Args:
        train: the training set.
        samples: samples of all steps.
        interval: steps between lines of the log.
        say: prints a line; None on ranks that print nothing.
    """

    def __init__(self, train: Dataset, samples: int, interval: int, say: Callable[[str], None] | None) -> None:
        self.train, self.interval, self.say = train, interval, say
        self.epochs = {name: math.ceil(n) for name, n in train.read_epochs(samples).items()}
        self._begun: dict[str, tuple[int, int]] = {}

    def after_step(self, step: Step) -> None:
        if step.report is None or self.say is None:
            return
        begun = self.train.begun(step.first, step.consumed_samples)
        self._begun |= {name: (epoch, step.iteration) for name, epoch in begun.items()}
        if step.iteration % self.interval == 0:
            told, self._begun = self._begun, {}
            for name, (epoch, iteration) in told.items():
                of = f" of {name}" if len(self.epochs) > 1 else ""
                self.say(
                    f"epoch {epoch + 1} of {max(self.epochs[name], epoch + 1)}{of} begins in iteration {iteration}"
                )
