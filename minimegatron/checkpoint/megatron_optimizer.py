"""The state of Megatron's optimizer under our names, so that a run goes on from Megatron's checkpoint.

| theirs                                            | ours                                               |
|---------------------------------------------------|----------------------------------------------------|
| `optimizer.state.exp_avg.decoder.layers....`      | `optimizer.exp_avg.decoder.layers.{l}....`         |
| `optimizer.state.exp_avg_sq....`                  | `optimizer.exp_avg_sq....`                         |
| `optimizer.state.param....` or `.fp32_param....`  | `optimizer.fp32_param....`; of fp32 weights itself |

| of `common.pt`                                    | ours                                     |
|---------------------------------------------------|------------------------------------------|
| `step` of a group, or `common_step`               | `optimizer.step....`, for each parameter |
| `grad_scaler`                                     | the same                                 |
| `opt_param_scheduler`, and `args`                 | `scheduler`                              |
| `iteration`, `args.consumed_train_samples`        | `counters`                               |
| `rng_state` (an object)                           | nothing: streams begin anew              |

Where an optimizer for dense parameters and one for experts are chained, names may begin with `chained_1.`. A moment
lies where its weight lies, so it goes through the same rules as the weight. Formats of a distributed optimizer that do
not store it so are refused:

| `param_state_sharding_type`  | stores                                                                          |
|------------------------------|---------------------------------------------------------------------------------|
| `fully_reshardable`          | what is above                                                                   |
| `dp_reshardable` (default)   | flat buckets of one tp and pp rank; nothing says which tensors they are made of |
| `fully_sharded_bucket_space` | the same, in older versions                                                     |
| `fully_sharded_model_space`  | flat pieces of tensors; 0.16.1 cannot write it                                  |
| `dp_zero_gather_scatter`     | a pickled object for each tp and pp rank                                        |

Megatron-LM: `sharded_state_dict` in `megatron/core/optimizer/optimizer.py` and `distrib_optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from minimegatron.checkpoint.megatron import as_ours
from minimegatron.checkpoint.ours import Continued
from minimegatron.checkpoint.sources import InMemory, Source, View
from minimegatron.checkpoint.torch_dist import TorchDist, read_number
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError

KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "param": "fp32_param", "fp32_param": "fp32_param"}
FORMATS = ("fully_reshardable", "not distributed")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
WEIGHTS_ONLY = "--no-load-optim converts the weights alone; a run that loads them begins with a new optimizer"
_SCHEDULE = (
    "num_steps max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style"
).split()


def optimizer_state(theirs: TorchDist, common: Mapping[str, Any]) -> str:
    """A description of the optimizer state in a checkpoint of Megatron's; "" for none."""
    names = [name for name in (*theirs.tensors, *theirs.objects) if name.startswith(("optimizer.", "chained_"))]
    if not names:
        return ""
    details = f"{len(names)} tensors and objects, {_format_of(theirs, common)}, the first is {min(names)}"
    return f"the state of an optimizer ({details})"


def _format_of(theirs: TorchDist, common: Mapping[str, Any]) -> str:
    """The format, as stated, or by the names of tensors."""
    formats = {str(one["param_state_sharding_type"]) for one in _chain(common) if "param_state_sharding_type" in one}
    if formats:
        return " and ".join(sorted(formats))
    if any(".dp_group_idx_" in name for name in theirs.tensors):
        return "dp_reshardable"
    distributed = any(name.startswith(("optimizer.distributed.", "chained_")) for name in theirs.objects)
    return "of a distributed optimizer" if distributed else "not distributed"


def _chain(common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of `common.pt` of each optimizer: one, or as many as are chained."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    chained = bool(optimizer) and all(type(key) is int for key in optimizer)
    return [one for one in (optimizer.values() if chained else [optimizer]) if isinstance(one, dict)]


def continued(theirs: TorchDist, common: Mapping[str, Any], config: TransformerConfig, weights: Source) -> Continued:
    """The state with which a run goes on.

    Args:
        theirs: the checkpoint.
        common: its `common.pt`.
        config: configuration of the model.
        weights: weights of the model under our names.

    Raises:
        CheckpointError: it is stored in a format that is not supported, or a part of it is missing.
    """
    folder, format_name = theirs.folder, _format_of(theirs, common)
    if format_name not in FORMATS:
        raise CheckpointError(
            f"{optimizer_state(theirs, common)} is stored in a form that is not read",
            where=str(folder),
            fix="let Megatron save it with --dist-ckpt-optim-fully-reshardable, or " + WEIGHTS_ONLY,
        )
    try:
        step = _step(theirs, common)
        tensors = _moments(theirs, config, weights)
        state = _state(theirs, common, step)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the state of the optimizer lacks something, or is not Adam's: {error}",
            where=str(folder),
            fix=WEIGHTS_ONLY,
        ) from None
    steps = {name: torch.tensor(float(step)) for name in tensors["optimizer.exp_avg."].tensors}
    return Continued(state["counters"]["iteration"], {**tensors, "optimizer.step.": InMemory(steps)}, state)


def _moments(theirs: TorchDist, config: TransformerConfig, weights: Source) -> dict[str, Source]:
    """Moments and main parameters under our names, each at the place of its weight."""
    called: dict[str, dict[str, str]] = {}
    for name in theirs.tensors:
        if name.startswith(("optimizer.", "chained_")):
            match = _STATE.fullmatch(name)
            if match is None or match[1] not in KINDS:
                raise ValueError(f"there is {name}")
            if called.setdefault(KINDS[match[1]], {}).setdefault(match[2], name) != name:
                raise ValueError(f"{match[1]} of {match[2]} is there twice")
    views = {kind: as_ours(theirs, config, names) for kind, names in called.items()}
    trained = {name: d for name, d in weights.tensors.items() if not name.endswith(".expert_bias")}
    half_precision = any(described.dtype != torch.float32 for described in trained.values())
    for kind in ("exp_avg", "exp_avg_sq", *["fp32_param"] * half_precision):
        moments = views[kind].tensors
        for name in sorted(trained.keys() | moments.keys()):
            if name not in trained or name not in moments or moments[name] != (torch.float32, trained[name].shape):
                raise ValueError(f"{kind} of {name} is {moments.get(name, 'not there')}")
    if not half_precision and "fp32_param" in views:
        _require_equal(views.pop("fp32_param"), weights)
    return {f"optimizer.{kind}.": view for kind, view in views.items()}


def _require_equal(main: View, weights: Source) -> None:
    """Check that the stored main parameters of fp32 weights equal the weights."""
    for name in main.tensors:
        if not torch.equal(main.read(name), weights.read(name)):
            raise ValueError(f"the main parameter of {name} is not its weight, and both are fp32")


def _step(theirs: TorchDist, common: Mapping[str, Any]) -> int:
    """The number of Adam steps."""
    counts = set[float]()
    for optimizer in _chain(common):
        state = optimizer.get("optimizer", optimizer)  # of an optimizer in fp32 it is torch's own
        shared = state.get("state", {}).get("common_step")
        steps = [group["step"] for group in state["param_groups"] if "step" in group] if shared is None else [shared]
        counts |= {read_number(theirs.folder, step) for step in steps}
    if len(counts) != 1:
        raise ValueError(f"its steps are {sorted(counts)}")
    return int(counts.pop())


def _state(theirs: TorchDist, common: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Counters, schedule and loss scale."""
    args, schedule, iteration = common["args"], common["opt_param_scheduler"], common["iteration"]
    counters = {
        "iteration": _whole(iteration),
        "consumed_train_samples": _whole(args["consumed_train_samples"]),
        "consumed_valid_samples": _whole(args.get("consumed_valid_samples", 0)),
        "skipped_iterations": max(0, iteration - step),
        "validation_loss": None,
        "recent_losses": [],
    }
    decay = args.get("lr_wsd_decay_iters")
    scheduler = {name: _plain(schedule[name]) for name in _SCHEDULE} | {
        "init_lr": _plain(args.get("lr_warmup_init", 0.0)),
        "wsd_decay_steps": None if decay is None else decay * args["global_batch_size"],
        "lr_wsd_decay_style": _plain(args.get("lr_wsd_decay_style", "exponential")),
    }
    scales = [one.get("grad_scaler") for one in _chain(common)]
    scaler = {name: read_number(theirs.folder, value) for name, value in (scales[0] or {}).items()}
    return {"counters": counters, "validation_loss": None, "scheduler": scheduler, "grad_scaler": scaler}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a counter is {value!r}")
    return value


def _plain(value: Any) -> int | float | str:
    if type(value) not in (int, float, str):
        raise ValueError(f"the schedule has {value!r}")
    return value  # type: ignore[no-any-return]
