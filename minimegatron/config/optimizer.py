"""The optimizer: its algorithm, schedule, clipping, loss scale, parameter groups, and the dtypes of its state.

`StateFields` says in which dtype the optimizer keeps its numbers, and on which device:

| bytes per parameter of a bf16 model     | weight | main    | gradient | moments | together |
|-----------------------------------------|--------|---------|----------|---------|----------|
| AdamW, default dtypes                   | 2      | 4       | 4        | 4 + 4   | 18       |
| `use_precision_aware_optimizer`         | 2      | 2       | 4        | 4 + 4   | 16       |
| `..., exp_avg..._dtype bf16` (both)     | 2      | 2       | 4        | 2 + 2   | 12       |
| `..., main_grads_dtype bf16`            | 2      | 2       | 2        | 2 + 2   | 10       |
| `..., fp8` moments in place of bf16     | 2      | 2       | 2        | 1 + 1   | 8        |
| `optimizer_cpu_offload`, on the GPU     | 2      | 0       | 4        | 0       | 6        |

Megatron requires the distributed optimizer for `use_precision_aware_optimizer`; here AdamW, which is elementwise, works
with every layout. With offload Megatron keeps fp32 whatever the dtypes say; here that is refused.

`param_groups` and `freeze` are patterns of logical parameter names, which are the same in every layout:

    --param-groups 'decoder.layers.*.mlp.*:lr_mult=0.1,wd_mult=0' 'output_layer.weight:wd_mult=0.5'
    --freeze 'embedding.*' 'decoder.layers.0.*'

Their syntax is checked here; `optim/groups` refuses a pattern that matches nothing, and two that contradict each other.

`COEFFICIENTS` are the polynomials of Muon's Newton-Schulz iteration (`optim/muon`):

| set             | rounds           | from                                                                |
|-----------------|------------------|---------------------------------------------------------------------|
| `quintic`       | multiples of 5   | each round its own polynomial (leloykun.github.io, Muon coefficients)|
| `simple`        | any              | Jordan 2024: one polynomial, ends within 0.7 ... 1.2                |
| `polar_express` | at least 8       | Amsel et al. 2025 (arXiv 2505.16932)                                |

Megatron-LM: `OptimizerConfig` in `megatron/core/optimizer/optimizer_config.py`; `ParamKey` and `ParamGroupOverride` of
`megatron/core/optimizer`, which scripts fill in Python.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from minimegatron.config.fields import BAD_STEP, BEGUN, OBSERVED, RUN, Config, elsewhere, free, opt
from minimegatron.errors import ConfigError, did_you_mean, require

if TYPE_CHECKING:
    import torch

SCHEDULE = elsewhere("the schedule compares itself (`optim/schedule`), and has flags of its own")

MULTIPLIERS = ("lr_mult", "wd_mult")


@dataclasses.dataclass(frozen=True)
class GroupRule:
    """The multipliers that one pattern sets.

    Attributes:
        pattern: pattern of logical names.
        values: multiplier -> number.
    """

    pattern: str
    values: dict[str, float]


def parse_group(text: str) -> GroupRule:
    """`PATTERN:lr_mult=X,wd_mult=Y`, of which one multiplier may be left out.

    Raises:
        ConfigError: with the word that is wrong.
    """
    pattern, colon, settings = text.rpartition(":")
    example = "for example 'decoder.layers.*.mlp.*:lr_mult=0.1,wd_mult=0'"
    require(bool(colon and pattern and settings), f"param_groups {text!r} is no PATTERN:NAME=NUMBER,...", example)
    values: dict[str, float] = {}
    for word in settings.split(","):
        name, equals, number = word.partition("=")
        known = did_you_mean(name, MULTIPLIERS) or f"choose among {', '.join(MULTIPLIERS)}"
        require(name in MULTIPLIERS, f"param_groups {text!r} sets {name!r}", known)
        require(bool(equals) and name not in values, f"param_groups {text!r}: {word!r}", example)
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigError(f"param_groups {text!r}: {number!r} is no number", fix=example) from None
        require(
            0 <= values[name] < float("inf"), f"param_groups {text!r}: {name} is {number}", "0 or a positive number"
        )
    return GroupRule(pattern, values)


Round = tuple[float, float, float]

COEFFICIENTS: dict[str, tuple[Round, ...]] = {
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "simple": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}


def coefficients_of(kind: str, rounds: int) -> tuple[Round, ...]:
    """a, b, c of each round.

    Raises:
        ConfigError: the set has no polynomials for this number of rounds.
    """
    rounds_of = COEFFICIENTS[kind]
    if kind == "polar_express":
        require(
            rounds >= len(rounds_of),
            f"muon_num_ns_steps={rounds} with muon_coefficient_type='polar_express'",
            f"at least {len(rounds_of)}",
        )
        return (*rounds_of, *rounds_of[-1:] * (rounds - len(rounds_of)))
    require(
        rounds % len(rounds_of) == 0,
        f"muon_num_ns_steps={rounds} with muon_coefficient_type={kind!r}, a set of {len(rounds_of)} polynomials",
        f"a multiple of {len(rounds_of)}, or --muon-coefficient-type simple",
    )
    return rounds_of * (rounds // len(rounds_of))


DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
KEPT = free("where the optimizer's numbers are kept, in dtypes that are compared")


@dataclasses.dataclass(frozen=True)
class StateFields(Config):
    """Dtypes of the optimizer's state, and offload."""

    use_precision_aware_optimizer: bool = opt(
        KEPT, False, "main parameters, gradients and moments of AdamW in the dtypes that follow"
    )
    main_params_dtype: str = opt(RUN, "fp32", "of main parameters; fp16 has a scale for each tensor", ("fp32", "fp16"))
    main_grads_dtype: str = opt(RUN, "fp32", "in which gradients are added up and travel", ("fp32", "bf16"))
    exp_avg_dtype: str = opt(
        RUN, "fp32", "of the first moment; fp16 and fp8 have scales", ("fp32", "fp16", "bf16", "fp8")
    )
    exp_avg_sq_dtype: str = opt(RUN, "fp32", "of the second moment, likewise", ("fp32", "fp16", "bf16", "fp8"))
    store_param_remainders: bool = opt(
        KEPT,
        True,
        "with use_precision_aware_optimizer: of an fp32 main parameter keep the 16 bits that a bf16 weight lacks",
    )
    optimizer_cpu_offload: bool = opt(KEPT, False, "main parameters and moments in the host's memory, updated there")
    optimizer_offload_fraction: float = opt(KEPT, 1.0, "the share of elements that is offloaded", least=0.0)
    overlap_cpu_optimizer_d2h_h2d: bool = opt(KEPT, False, "gradients and weights are copied while the host computes")
    use_torch_optimizer_for_cpu_offload: bool = opt(
        KEPT, False, "with offload: torch's optimizer on the GPU too, no kernel"
    )
    pin_cpu_grads: bool = opt(KEPT, True, "offloaded gradients in pinned memory")
    pin_cpu_params: bool = opt(KEPT, True, "offloaded parameters in pinned memory")

    @property
    def fp32_copies(self) -> bool:
        """Whether a 16-bit weight has an fp32 copy on its device."""
        return not (self.use_precision_aware_optimizer or self.optimizer_cpu_offload)

    @property
    def grad_dtype(self) -> torch.dtype:
        """torch's dtype for `main_grads_dtype`."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.main_grads_dtype]

    def _check_states(self, optimizer: str) -> None:
        low = [f"{name}={value!r}" for name in DTYPES if (value := getattr(self, name)) != "fp32"]
        aware, offload = self.use_precision_aware_optimizer, self.optimizer_cpu_offload
        named = ", ".join(low)
        require(aware or not low, f"{named} without use_precision_aware_optimizer", "give it, or drop them")
        require(
            not aware or optimizer == "adam",
            f"use_precision_aware_optimizer with optimizer={optimizer!r}: the dtypes are those of AdamW's moments",
            "--optimizer adam, or drop it",
        )
        require(
            not offload or not low,
            f"{named} with optimizer_cpu_offload, which keeps fp32 on both sides",
            "drop the dtypes, or --optimizer-cpu-offload",
        )
        require(
            not offload or optimizer in ("adam", "sgd"),
            f"optimizer_cpu_offload with optimizer={optimizer!r}: Muon's products of matrices are for a GPU",
            "--optimizer adam, or no offload",
        )
        fraction = self.optimizer_offload_fraction
        require(fraction <= 1.0, f"optimizer_offload_fraction is {fraction}", "choose it in [0, 1]")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(StateFields):
    """Optimizer, its schedules, clipping and loss scaling."""

    optimizer: str = opt(
        RUN,
        "adam",
        "adam is AdamW: decoupled weight decay; muon moves matrices, AdamW the rest; dist_muon: shared out to replicas",
        ("adam", "sgd", "muon", "dist_muon"),
    )
    lr: float = opt(SCHEDULE, 1e-3, "peak learning rate")
    min_lr: float = opt(SCHEDULE, 0.0, "the schedule never goes below", least=0.0)
    weight_decay: float = opt(SCHEDULE, 0.01, "decoupled; not on biases and 1-D parameters", least=0.0)
    start_weight_decay: float | None = opt(SCHEDULE, None, "first value of a weight decay ramp", least=0.0)
    end_weight_decay: float | None = opt(SCHEDULE, None, "last value of a weight decay ramp", least=0.0)
    weight_decay_incr_style: str = opt(SCHEDULE, "constant", "shape of that ramp", ("constant", "linear", "cosine"))
    adam_beta1: float = opt(RUN, 0.9, "decay of the first moment", least=0.0, below=1.0)
    adam_beta2: float = opt(RUN, 0.999, "decay of the second moment", least=0.0, below=1.0)
    adam_eps: float = opt(RUN, 1e-8, "added to the square root of the second moment", least=0.0)
    sgd_momentum: float = opt(RUN, 0.9, "momentum of sgd", least=0.0)
    clip_grad: float = opt(RUN, 1.0, "global gradient norm is cut to this; 0 switches clipping off", least=0.0)
    lr_decay_style: str = opt(
        SCHEDULE, "linear", "schedule after the warm-up", ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = opt(SCHEDULE, None, "iterations until min_lr; default the whole run", least=1)
    lr_warmup_iters: int = opt(SCHEDULE, 0, "iterations of linear warm-up", least=0)
    lr_warmup_fraction: float | None = opt(
        SCHEDULE, None, "warm-up as a share of the decay, instead of lr_warmup_iters"
    )
    lr_decay_samples: int | None = opt(SCHEDULE, None, "samples until min_lr, instead of lr_decay_iters", least=1)
    lr_warmup_samples: int = opt(SCHEDULE, 0, "samples of linear warm-up, instead of lr_warmup_iters", least=0)
    lr_warmup_init: float = opt(SCHEDULE, 0.0, "learning rate at the start of the warm-up", least=0.0)
    lr_wsd_decay_style: str = opt(
        SCHEDULE, "exponential", "WSD's final decay", ("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = opt(SCHEDULE, None, "iterations of WSD's final decay", least=1)
    loss_scale: float | None = opt(RUN, None, "constant loss scale for fp16; default dynamic", above=0.0)
    initial_loss_scale: float = opt(BEGUN, 2.0**32, "first dynamic loss scale", above=0.0)
    min_loss_scale: float = opt(RUN, 1.0, "dynamic loss scale never goes below", above=0.0)
    loss_scale_window: int = opt(RUN, 1000, "clean steps before the scale doubles", least=1)
    hysteresis: int = opt(RUN, 2, "overflows before the scale halves", least=1)
    check_for_nan_in_loss_and_grad: bool = opt(BAD_STEP, True, "stop with exit status 6 on a number that is not finite")
    log_num_zeros_in_grad: bool = opt(OBSERVED, False, "count the zeros of the gradient")
    muon_momentum: float = opt(RUN, 0.95, "decay of Muon's momentum", least=0.0, below=1.0)
    muon_use_nesterov: bool = opt(RUN, False, "Muon looks one gradient ahead of its momentum")
    muon_split_qkv: bool = opt(RUN, True, "Muon takes q, k and v of a fused projection as three matrices")
    muon_scale_mode: str = opt(
        RUN, "spectral", "factor of an update by the matrix's shape", ("spectral", "shape_scaling", "unit_rms_norm")
    )
    muon_extra_scale_factor: float = opt(RUN, 1.0, "a further factor; 0.2 gives updates the size of AdamW's", above=0.0)
    muon_num_ns_steps: int = opt(RUN, 5, "rounds of the Newton-Schulz iteration", least=1)
    muon_coefficient_type: str = opt(RUN, "quintic", "polynomials of the iteration", tuple(COEFFICIENTS))
    muon_fp32_matmul_prec: str = opt(RUN, "medium", "its products: medium in bf16, high in fp32", ("medium", "high"))
    muon_tp_mode: str = opt(
        RUN,
        "duplicated",
        "of a matrix that is cut over tp: gathered, iterated together, or each part by itself",
        ("duplicated", "distributed", "blockwise"),
    )
    decoupled_lr: float | None = opt(RUN, None, "peak learning rate of word embedding and output layer", least=0.0)
    decoupled_min_lr: float | None = opt(RUN, None, "their schedule never goes below; default min_lr", least=0.0)
    apply_wd_to_qk_layernorm: bool = opt(RUN, False, "weight decay on the norms of queries and keys as well")
    param_groups: tuple[str, ...] = opt(
        RUN,
        (),
        "factors of learning rate and weight decay by name: 'decoder.*.mlp.*:lr_mult=0.1,wd_mult=0' ...",
        repeats=True,
    )
    freeze: tuple[str, ...] = opt(
        RUN, (), "parameters that do not move, by patterns of their names: 'embedding.*' ...", repeats=True
    )

    def _check(self) -> None:
        require(self.lr >= self.min_lr, f"lr={self.lr}, min_lr={self.min_lr}", "choose lr >= min_lr")
        self._check_groups()
        self._check_states(self.optimizer)
        coefficients_of(self.muon_coefficient_type, self.muon_num_ns_steps)
        warmups = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        for names in (("lr_decay_iters", "lr_decay_samples"), warmups):
            given = [name for name in names if getattr(self, name) != getattr(OptimizerConfig, name)]
            require(len(given) <= 1, f"{' and '.join(given)} are given", "give one of them")
        if self.lr_warmup_fraction is not None:
            require(
                0.0 <= self.lr_warmup_fraction <= 1.0,
                f"lr_warmup_fraction is {self.lr_warmup_fraction}",
                "choose it in [0, 1]",
            )
        if self.lr_decay_style == "WSD":
            require(
                self.lr_wsd_decay_iters is not None,
                "lr_decay_style WSD without lr_wsd_decay_iters",
                "give --lr-wsd-decay-iters",
            )

    @property
    def has_matrices(self) -> bool:
        """Whether Muon updates the matrices."""
        return self.optimizer in ("muon", "dist_muon")

    def _check_groups(self) -> None:
        for text in self.param_groups:
            parse_group(text)
        peak, floor = self.decoupled_lr, self.decoupled_min_lr
        require(
            floor is None or peak is not None,
            "decoupled_min_lr without decoupled_lr",
            "give --decoupled-lr, or drop --decoupled-min-lr",
        )
        lowest = self.min_lr if floor is None else floor
        require(
            peak is None or peak >= lowest,
            f"decoupled_lr={peak} is below its floor {lowest}",
            "choose decoupled_lr above",
        )
