"""Whether a run that goes on is the run that ended: what of it is compared.

The problem in a sentence: a checkpoint is loaded with another seed, split or sequence length, the counter says 80,000
samples, and the run goes on without a word on samples that have nothing to do with those 80,000.

A field of a configuration says itself what kind it is (`config/fields`, with the reason where it is free):

| kind               | where weights alone are taken (`--finetune`) | where the run goes on                           |
|--------------------|----------------------------------------------|-------------------------------------------------|
| `MODEL`, `TRAINED` | equal to the checkpoint's                    | equal to the checkpoint's                       |
| `RUN`              | free: another run begins                     | equal to the checkpoint's                       |
| `elsewhere`        | free                                         | equal in what they lead to: files, ids, batches |
| `free`             | free                                         | free                                            |

A field that nothing reads in this run (`without_effect`) is not compared, nor is the optimizer where its state is not
taken (`--no-load-optim`). `--override-checkpoint-args` takes this run's values, and the log names each with both. What
a checkpoint does not say, because it is older or was converted, cannot be compared; the log names it.

Megatron-LM compares a few sizes of the model (`check_checkpoint_args` in `megatron/training/checkpointing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimegatron.config import OptimizerConfig, TransformerConfig, fields
from minimegatron.errors import CheckpointError
from minimegatron.training.datasets import RunData
from minimegatron.training.microbatches import NumMicrobatches
from minimegatron.training.run import KINDS, RunConfig
from minimegatron.training.without_effect import counts

MODEL = TransformerConfig.names_of(fields.MODEL, fields.TRAINED)
OF_RUN = {name for name, kind in KINDS.items() if kind == fields.RUN}
FREE = {name for name, kind in KINDS.items() if kind.name == "free"}
OF_OPTIMIZER = OptimizerConfig.__dataclass_fields__.keys()
FACTS = {"training data", "tokenizer"}
SHOWN = 3  # differences in an error
NOTHING = "nothing"  # where a checkpoint has a fact that this run does not


def fields_of(run: RunConfig) -> dict[str, Any]:
    """Every field of a run that is compared by its value; as JSON has it."""
    found = {name: value for name, value in run.fields().items() if name in OF_RUN | MODEL}
    if run.spec is not None:
        found["spec"] = " ".join(run.spec)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def facts_of(run: RunConfig, sizes: NumMicrobatches, data: RunData) -> dict[str, Any]:
    """What a checkpoint says of its run: fields, and what the others lead to."""
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
    """Hold a run against the checkpoint that it loads.

    Args:
        state: of the checkpoint's manifest.
        run: that loads it.
        facts: of this run (`facts_of`).
        weights_only: nothing but the weights is taken.
        new_optimizer: the run goes on, with an optimizer that begins.

    Returns:
        What the log should say: differences that are accepted, what could not be compared; or "".

    Raises:
        CheckpointError: it is another model's or another run's; names the differences with both values.
    """
    saved = {**({"seed": state["seed"]} if "seed" in state else {}), **state["model"], **state.get("run", {})}
    free = FREE | (OF_RUN | FACTS if weights_only else OF_OPTIMIZER if new_optimizer else set())
    if run.model.position_embedding_type != "learned_absolute":
        free |= {"max_position_embeddings"}  # no tensor has that size
    names = [name for name in {**facts, **saved} if name not in free and counts(name, run)]
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
    said = ["\n  ".join(["--override-checkpoint-args goes on with another run than the checkpoint's:", *lines])]
    unknown = [name for name in names if name not in saved]
    return "\n".join(
        (said if lines else []) + ([f"not in the checkpoint, so not compared: {', '.join(unknown)}"] if unknown else [])
    )


def _plain(value: Any) -> Any:
    """What is compared: of a file its contents, without its name."""
    return [one[0] for one in value] if isinstance(value, list) and value and isinstance(value[0], list) else value


def _shown(value: Any) -> str:
    """For a line of a message."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        shown = "; ".join(f"{name}, {contents}" for contents, name in value[:2])
        return shown + (f"; and {len(value) - 2} more files" if len(value) > 2 else "")
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else repr(value)
