"""Facts that ranks compare when they meet, and facts in which a run must equal the checkpoint that it goes on from.

**Between ranks** (`rank_facts`; `launch/agreement` compares):

| facts                                                 | compared                        | because                 |
|-------------------------------------------------------|---------------------------------|-------------------------|
| fields of the configuration, but `rank_local` ones    | when the ranks meet             | groups follow from them |
| versions of Python, torch and numpy                   | when the ranks meet             | results would differ    |
| source files of this package, the file of `--spec`    | when the ranks meet             | one node was edited     |
| tokenizer, vocabulary, samples, data files            | when the data is open           | rank 0 makes some first |

Another version of torch is an error and not a warning: two versions need not speak the same protocol of gloo or NCCL,
and a kernel that sums in another order gives replicas that differ in their bits. Only Python's major and minor version
are compared.

**With the checkpoint** (`compare`). Without this check a checkpoint could be loaded with another seed, split or
sequence length: the counter says 80,000 samples, and the run would go on with samples that have nothing to do with
those 80,000. Each field of a configuration has a kind (`config/fields`):

| kind               | if only weights are taken (`--finetune`) | if the run goes on                                  |
|--------------------|------------------------------------------|-----------------------------------------------------|
| `MODEL`, `TRAINED` | equal to the checkpoint's                | equal to the checkpoint's                           |
| `RUN`              | free: another run begins                 | equal to the checkpoint's                           |
| `elsewhere`        | free                                     | with equal effect: contents of files, ids, batches  |
| `free`             | free                                     | free                                                |

A field that this run does not read is not compared, nor is the optimizer if its state is not loaded
(`--no-load-optim`). With `--override-checkpoint-args` this run's values win, and the log names both. The log also names
what an older or converted checkpoint does not contain and so cannot be compared.

Equal fields do not make an equal order: it is computed by numpy, or read from a cache that somebody has replaced, on
each rank for itself. So a checkpoint has a digest of the sample that comes next, and every rank that goes on reads that
sample and compares (`same_place`).

Megatron-LM compares a few sizes of the model (`check_checkpoint_args` in `megatron/training/checkpointing.py`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

import minimegatron
from minimegatron.config import OptimizerConfig, TransformerConfig, fields
from minimegatron.config.run import ALL_SECTIONS, KINDS, RunConfig
from minimegatron.errors import CheckpointError
from minimegatron.training.datasets import RunData, digest
from minimegatron.training.microbatches import NumMicrobatches

MODEL = TransformerConfig.names_of(fields.MODEL, fields.TRAINED)
OF_RUN = {name for name, kind in KINDS.items() if kind == fields.RUN}
FREE = {name for name, kind in KINDS.items() if kind.name == "free"}
OF_OPTIMIZER = OptimizerConfig.__dataclass_fields__.keys()
FACTS = {"training data", "tokenizer"}
SHOWN = 3  # differences in an error
NOTHING = "nothing"  # where a checkpoint has a fact that this run does not
# Fields that a rank may have for itself, and why that changes nothing for the others.
RANK_LOCAL: dict[str, str] = {
    f.name: f.metadata["rank_local"] for cls in ALL_SECTIONS for f in dataclasses.fields(cls)
    if f.metadata["rank_local"]
}  # fmt: skip


def rank_facts(run: RunConfig) -> dict[str, Any]:
    """Facts that are known before the ranks meet: configuration, versions, code."""
    facts = {name: value for name, value in run.fields().items() if name not in RANK_LOCAL}
    facts["version of Python"] = ".".join(map(str, sys.version_info[:2]))
    facts["version of torch"], facts["version of numpy"] = torch.__version__, numpy.__version__
    facts["version of minimegatron"] = minimegatron.__version__
    if run.spec is not None:
        facts["spec"] = " ".join(run.spec)
        facts["source of the spec"] = _source_of(run.spec[0])
    if run.model.model_class is not None:
        facts["source of model_class"] = _source_of(run.model.model_class.partition(":")[0])
    return facts | source_facts()


def source_facts() -> dict[str, str]:
    """{file of this package: digest of its bytes}"""
    package = Path(minimegatron.__file__).parent
    files = (p for p in package.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"))
    return {str(p.relative_to(package.parent)): digest([p.read_bytes()]) for p in files}


def _source_of(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    path = spec.origin if spec is not None else None
    return digest([Path(path).read_bytes()]) if path is not None and os.path.isfile(path) else "not found"


def fields_of(run: RunConfig) -> dict[str, Any]:
    """Every field of a run that is compared by its value, as JSON stores it."""
    values = {name: value for name, value in run.fields().items() if name in OF_RUN | MODEL}
    if run.spec is not None:
        values["spec"] = " ".join(run.spec)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def facts_of(run: RunConfig, sizes: NumMicrobatches, data: RunData) -> dict[str, Any]:
    """The facts of a run that its checkpoints contain: fields, and the effects of fields of kind `elsewhere`."""
    batches = [n * sizes.micro_batch_size * sizes.data_parallel_size for n in sizes.all()]
    return fields_of(run) | {
        "global_batch_size": [*batches, *([f"over {sizes.rampup.samples} samples"] if sizes.rampup else [])],
        "training data": [list(one) for one in data.trained_on],
        "tokenizer": data.tokenizer.identity,
    }


def compare(
    state: Mapping[str, Any],
    run: RunConfig,
    facts: Mapping[str, Any],
    weights_only: bool,
    new_optimizer: bool = False,
) -> str:
    """Compare a run with the checkpoint that it loads.

    Args:
        state: `state` of the checkpoint's manifest.
        run: the run.
        facts: its facts (`facts_of`).
        weights_only: only the weights are loaded.
        new_optimizer: the run goes on with a new optimizer.

    Returns:
        Lines for the log: differences that are accepted, facts that could not be compared; or "".

    Raises:
        CheckpointError: it is another model's or another run's; names the differences with both values.
    """
    saved = {**({"seed": state["seed"]} if "seed" in state else {}), **state["model"], **state.get("run", {})}
    free = FREE | (OF_RUN | FACTS if weights_only else OF_OPTIMIZER if new_optimizer else set())
    if run.model.position_embedding_type != "learned_absolute":
        free |= {"max_position_embeddings"}  # no tensor has that size
    names = [name for name in {**facts, **saved} if name not in free and not run.unmet(name)]
    differs = [name for name in names if name in saved and _plain(saved[name]) != _plain(facts.get(name, NOTHING))]
    lines = [f"{name}: checkpoint {_shown(saved[name])}, now {_shown(facts.get(name, NOTHING))}" for name in differs]
    if differs and not run.checkpoint.override_checkpoint_args:
        what, other = "run", "--finetune to begin a new run with its weights"
        if MODEL.intersection(differs):
            what, other = "model", "--use-checkpoint-args for its model"
        more = f" (and {', '.join(differs[SHOWN : SHOWN + 8])})" if len(lines) > SHOWN else ""
        raise CheckpointError(
            f"the checkpoint is of another {what}:\n  " + "\n  ".join(lines[:SHOWN]) + more,
            fix=f"give the flags of the run that wrote it, or {other}; --override-checkpoint-args goes on all the same",
        )
    accepted = ["\n  ".join(["--override-checkpoint-args goes on with another run than the checkpoint's:", *lines])]
    unknown = [name for name in names if name not in saved]
    return "\n".join(
        (accepted if lines else [])
        + ([f"not in the checkpoint, so not compared: {', '.join(unknown)}"] if unknown else [])
    )


def same_place(state: Mapping[str, Any], tokens_of: Callable[[int], str], override: bool) -> str:
    """Compare the next sample of a run with that of the checkpoint from which it goes on.

    Args:
        state: `state` of the checkpoint's manifest.
        tokens_of: digest of a training sample of this run by its number; "" if it cannot be said.
        override: go on all the same.

    Returns:
        A line for the log if another sample is accepted; or "".

    Raises:
        CheckpointError: the next sample is another one.
    """
    number = state["counters"]["consumed_train_samples"]
    saved, now = state.get("next_sample", ""), tokens_of(number)
    if not saved or not now or saved == now:
        return ""
    what = f"sample {number}, the next of the training set, has other tokens than when the run was saved"
    if override:
        return f"{what}: samples may be read twice, and others never"
    raise CheckpointError(
        f"{what}: the order of the samples has changed",
        fix="the order follows from the seed, numpy's shuffle and the index arrays kept in DATA.cache or "
        "--data-cache-path: remove what is cached, and take the numpy of the run; --override-checkpoint-args goes on "
        "all the same",
    )


def _plain(value: Any) -> Any:
    """The value that is compared: of a file its contents, without its name."""
    return [one[0] for one in value] if isinstance(value, list) and value and isinstance(value[0], list) else value


def _shown(value: Any) -> str:
    """A value, shortened for a line of a message."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        shown = "; ".join(f"{name}, {contents}" for contents, name in value[:2])
        return shown + (f"; and {len(value) - 2} more files" if len(value) > 2 else "")
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else repr(value)
