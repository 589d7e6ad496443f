"""Learning rate and weight decay as functions of the step.

The problem in a sentence: the same rate cannot serve the first hundred steps, when Adam's moments are still noise, the
long middle, and the end, when the weights should settle.

With `n` the step, `w` the warm-up, `N` the end of the decay, `L` the peak (max_lr), `l` the floor (min_lr), `i` the
start of the warm-up (init_lr):

    n <= w        lr = i + (L - i) n / w                          warm-up, whatever the style
    w < n <= N    lr = l + (L - l) c(r),  r = (n - w) / (N - w)   decay
    n > N         lr = l

| style                 | c(r)                | remark                                                         |
|-----------------------|---------------------|----------------------------------------------------------------|
| `linear`              | 1 - r               |                                                                |
| `cosine`              | (1 + cos(pi r)) / 2 | Loshchilov & Hutter 2016, arXiv 1608.03983                     |
| `WSD`                 | 1, at the end d(s)  | warm-up, stable, decay. Hu et al. 2024, arXiv 2404.06395       |
| `constant`            |                     | lr = L for ever after the warm-up                              |
| `inverse-square-root` |                     | lr = max(l, L sqrt(w / n)), of "Attention is all you need"     |

WSD decays only over the last `wsd_decay_steps`, s = 0 to 1, so a run can be prolonged from its stable part: N need not
be known beforehand. d(s): linear 1 - s, cosine (1 + cos(pi s)) / 2, exponential 2 * 0.5^s - 1, minus_sqrt 1 - sqrt(s).

Weight decay may grow: from start_wd to end_wd over wd_incr_steps, linearly or along a half cosine.

A *step* is whatever the caller counts. Megatron counts samples, and so does `from_config`: a length in iterations
becomes the samples that those iterations read, also where the batch size ramps up and the first ones read fewer.
(Megatron multiplies by the final batch size, and refuses a ramp-up beside lengths in iterations.)
Megatron-LM: `megatron/core/optimizer_param_scheduler.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from minimegatron.config import OptimizerConfig
from minimegatron.errors import CheckpointError, ConfigError, require

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")

# The flags that set each field, for messages.
_DECAY = "the samples until the decay ends (--lr-decay-iters, -samples; else the length of the run, --train-iters)"
FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "lr_warmup_steps": "the samples of the warm-up (--lr-warmup-iters, -samples, -fraction)",
    "lr_decay_steps": _DECAY,
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "the first weight decay (--start-weight-decay, --weight-decay)",
    "end_wd": "the last weight decay (--end-weight-decay, --weight-decay)",
    "wd_incr_steps": "the samples over which weight decay grows (the length of the run, --train-iters)",
    "wd_incr_style": "--weight-decay-incr-style",
    "wsd_decay_steps": "the samples of WSD's decay (--lr-wsd-decay-iters)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The closed form: learning rate and weight decay at any step, without a history. Fields as in Megatron.

    Raises:
        ConfigError: a combination that has no meaning.
    """

    max_lr: float
    lr_decay_steps: int
    min_lr: float = 0.0
    init_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_style: str = "linear"
    start_wd: float = 0.0
    end_wd: float = 0.0
    wd_incr_steps: int = 1
    wd_incr_style: str = "constant"
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        require(
            self.min_lr >= 0 and self.min_lr <= self.max_lr and self.init_lr <= self.max_lr,
            f"max_lr={self.max_lr}, min_lr={self.min_lr}, init_lr={self.init_lr}",
            "choose 0 <= min_lr <= max_lr and init_lr <= max_lr",
        )
        require(
            0 <= self.lr_warmup_steps < self.lr_decay_steps,
            f"the warm-up ({self.lr_warmup_steps}) does not end before the decay ({self.lr_decay_steps}); a run counts "
            "both in samples, which are iterations times --global-batch-size",
            "a shorter --lr-warmup-iters, or a longer --lr-decay-iters or --train-iters",
        )
        for name, choices in (("lr_decay_style", DECAY_STYLES), ("wd_incr_style", WD_INCR_STYLES)):
            value = getattr(self, name)
            require(value in choices, f"{name}={value!r}", f"choose among {', '.join(choices)}")
        if self.lr_decay_style == "WSD":
            require(
                self.wsd_decay_steps is not None and 0 < self.wsd_decay_steps <= self.lr_decay_steps,
                f"WSD decays over {self.wsd_decay_steps} of {self.lr_decay_steps} steps",
                "give wsd_decay_steps, between 1 and lr_decay_steps",
            )
            require(
                self.lr_wsd_decay_style in WSD_DECAY_STYLES,
                f"lr_wsd_decay_style={self.lr_wsd_decay_style!r}",
                f"choose among {', '.join(WSD_DECAY_STYLES)}",
            )
        require(
            0 <= self.start_wd <= self.end_wd and (self.wd_incr_style != "constant" or self.start_wd == self.end_wd),
            f"weight decay from {self.start_wd} to {self.end_wd}, style {self.wd_incr_style}",
            "weight decay may only grow, and a constant one has one value",
        )
        require(self.wd_incr_steps >= 1, f"wd_incr_steps is {self.wd_incr_steps}", "must be at least 1")

    @classmethod
    def from_config(
        cls,
        config: OptimizerConfig,
        *,
        global_batch_size: int,
        train_iters: int,
        train_samples: int | None = None,
        samples_of: Callable[[int], int] | None = None,
    ) -> Schedule:
        """The schedule of a run, with samples as its steps: call `step(samples of this iteration)`.

        Args:
            config: lengths in iterations or in samples.
            global_batch_size: samples of an iteration.
            train_iters: length of the run, and the default of its decay.
            train_samples: length of the run in samples, instead of train_iters.
            samples_of: n -> samples of the first n iterations; default n times the global batch size.
        """
        samples_of = samples_of or (lambda iterations: iterations * global_batch_size)
        length = samples_of(train_iters) if train_samples is None else train_samples
        decay = config.lr_decay_samples or samples_of(config.lr_decay_iters or 0) or length
        warmup: float = config.lr_warmup_samples or samples_of(config.lr_warmup_iters)
        start, end, wsd = config.start_weight_decay, config.end_weight_decay, config.lr_wsd_decay_iters
        last = max(config.lr_decay_iters or train_iters, wsd or 0)
        return cls(
            max_lr=config.lr,
            min_lr=config.min_lr,
            init_lr=config.lr_warmup_init,
            lr_warmup_steps=warmup if config.lr_warmup_fraction is None else config.lr_warmup_fraction * decay,
            lr_decay_steps=decay,
            lr_decay_style=config.lr_decay_style,
            start_wd=config.weight_decay if start is None else start,
            end_wd=config.weight_decay if end is None else end,
            wd_incr_steps=length,
            wd_incr_style=config.weight_decay_incr_style,
            wsd_decay_steps=None if wsd is None else samples_of(last) - samples_of(last - wsd),
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        )

    def acting(self) -> dict[str, Any]:
        """The fields that affect a value at some step: without the length of a constant decay, for example."""
        unused = set[str]()
        if self.lr_decay_style == "constant":
            unused |= {"lr_decay_steps", "min_lr"}
        if self.lr_decay_style != "WSD":
            unused |= {"wsd_decay_steps", "lr_wsd_decay_style"}
        if self.wd_incr_style == "constant":
            unused |= {"wd_incr_steps"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in unused}

    def lr_at(self, step: int, max_lr: float | None = None, min_lr: float | None = None) -> float:
        """Learning rate at `step` (0 is before the first); a parameter group may have its own peak and floor."""
        peak = self.max_lr if max_lr is None else max_lr
        floor = self.min_lr if min_lr is None else min_lr
        warmup = self.lr_warmup_steps
        if warmup > 0 and step <= warmup:
            return self.init_lr + (peak - self.init_lr) * step / warmup
        if self.lr_decay_style == "constant":
            return peak
        if step > self.lr_decay_steps:
            return floor
        if self.lr_decay_style == "inverse-square-root":
            return max(floor, peak * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
        return floor + (peak - floor) * self._decay(step)

    def _decay(self, step: int) -> float:
        """c(r) of the module docstring: 1 at the peak, 0 at the floor."""
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None, "checked at construction"
            into = step - (self.lr_decay_steps - self.wsd_decay_steps)
            return 1.0 if into <= 0 else _falling(self.lr_wsd_decay_style or "", into / self.wsd_decay_steps)
        return _falling(
            self.lr_decay_style, (step - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        )

    def wd_at(self, step: int) -> float:
        """Weight decay at `step`, before a parameter group's `wd_mult`."""
        if step > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        ratio = step / self.wd_incr_steps
        grown = ratio if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start_wd + grown * (self.end_wd - self.start_wd)


def _falling(shape: str, s: float) -> float:
    """The shape of the decay, from 1 at s=0 to 0 at s=1."""
    if shape == "linear":
        return 1.0 - s
    if shape == "cosine":
        return 0.5 * (math.cos(math.pi * s) + 1.0)
    if shape == "exponential":
        return 2.0 * math.pow(0.5, s) - 1.0
    assert shape == "minus_sqrt", f"unchecked shape {shape}"
    return 1.0 - math.sqrt(s)


class OptimizerParamScheduler:
    """Writes the schedule's values into an optimizer's parameter groups.

    A group may have `max_lr` and `min_lr` of its own, and factors: `lr_mult` of the learning rate, `wd_mult` of weight
    decay (0 on biases, norms).

    Args:
        param_groups: those of a torch optimizer; their `lr` and `weight_decay` are overwritten, at once and at every
            step.
        schedule: the closed form.
        before: builds the schedule that older versions made of the same configuration; their runs resume with it.
    """

    def __init__(
        self,
        param_groups: Sequence[MutableMapping[str, Any]],
        schedule: Schedule,
        before: Callable[[], Schedule] | None = None,
    ) -> None:
        self.param_groups = param_groups
        self.schedule = schedule
        self._before = before
        self._counted = True  # lengths in iterations are those of the ramp-up
        self.num_steps = 0
        self.step(0)

    def step(self, increment: int = 1) -> None:
        """Advance by `increment` steps and set every group."""
        self.num_steps += increment
        for group in self.param_groups:
            lr = self.schedule.lr_at(self.num_steps, group.get("max_lr"), group.get("min_lr"))
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.schedule.wd_at(self.num_steps) * group.get("wd_mult", 1.0)

    @property
    def lr(self) -> float:
        """Current learning rate of groups without a peak of their own, for the log."""
        return self.schedule.lr_at(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        counted = {"counts_ramp_up": True} if self._counted else {}
        return {"num_steps": self.num_steps, **counted, **dataclasses.asdict(self.schedule)}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        use_checkpoint_opt_param_scheduler: bool = False,
        override_opt_param_scheduler: bool = False,
    ) -> None:
        """Continue where a checkpoint stopped.

        Args:
            state: from `state_dict`.
            use_checkpoint_opt_param_scheduler: if the two schedules differ, the checkpoint's wins.
            override_opt_param_scheduler: if they differ, the current one wins.

        Raises:
            CheckpointError: they differ and neither flag says which one wins, or a value is missing.
            ConfigError: both flags are given.
        """
        require(
            not (use_checkpoint_opt_param_scheduler and override_opt_param_scheduler),
            "both override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are given",
            "give one of them",
        )
        names = dataclasses.asdict(self.schedule).keys()
        missing = {"num_steps", *names} - state.keys()
        if missing:
            raise CheckpointError(
                f"the scheduler's state lacks {', '.join(sorted(missing))}", fix="load a checkpoint of this version"
            )
        saved = Schedule(**{name: state[name] for name in names})
        acting = self.schedule.acting()
        differs = [
            f"{FLAGS[name]}: {ours} now, {getattr(saved, name)} in the checkpoint"
            for name, ours in acting.items()
            if ours != getattr(saved, name)
        ]
        if differs and (use_checkpoint_opt_param_scheduler or self._began_before(saved, state)):
            self.schedule, self._counted = saved, "counts_ramp_up" in state
        elif differs and not override_opt_param_scheduler:
            raise CheckpointError(
                "the schedule is not the checkpoint's; " + "; ".join(differs),
                fix="--override-opt_param-scheduler takes the new one, --use-checkpoint-opt_param-scheduler the old",
            )
        self.num_steps = 0
        self.step(state["num_steps"])

    def _began_before(self, saved: Schedule, state: Mapping[str, Any]) -> bool:
        """Whether the checkpoint is of the same configuration and of a version that ignored the batch-size ramp-up."""
        if self._before is None or "counts_ramp_up" in state:
            return False
        try:
            return self._before() == saved
        except ConfigError:
            return False
