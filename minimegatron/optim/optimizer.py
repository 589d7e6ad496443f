"""One optimizer step: from gradients that live on all ranks to new weights, one decision on all ranks.

The problem in a sentence: weights in bf16 have three digits, an update is a thousandth of a weight, so adding updates
to bf16 weights adds nothing; and a NaN that only one rank sees must stop them all.

So each 16-bit parameter has an fp32 *main* parameter. Gradients are read into fp32, the update happens there, and the
result is rounded back into the model (an `Update` of `optim/main_params.py` does 4 to 6, by one kernel where there is
one: `ops.optimizer_step`):

    1  read        g = param.main_grad (fp32, of the DDP buffer), else param.grad
    2  look        norm, zeros, non-finite tensors: one message of 24 bytes over all ranks (`optim/clip.py`)
    3  decide      on the host, from numbers that are equal everywhere
                     not finite, with a grad scaler      skip, tell the scaler
                     not finite, without                 raise BadStep on every rank, or skip
    4  scale       g *= 1/S * min(1, clip / (norm/S + 1e-6))        unscaling and clipping are one multiplication
    5  step        torch's fused AdamW or SGD on the main parameters
    6  write back  param = main, rounded to its dtype

Bytes per parameter of a bf16 model with AdamW: 2 weight + 4 main + 4 main_grad + 4 + 4 moments = 18. In fp32 the
parameter is its own main: 16. AdamW decays weights beside the gradient (decoupled), torch's SGD through it (L2).

The host waits for the device once a step, in 3: skipping, raising and logging all need the numbers there.

State is keyed by the logical name of the parameter, never by its position: adding a parameter, or building the model
in another order, cannot hand one parameter's moments to another.

Loshchilov & Hutter 2017 (arXiv 1711.05101). Megatron-LM: `megatron/core/optimizer/optimizer.py`
(`FP32Optimizer`, `Float16OptimizerWithFloat16Params`), where step 2 is three messages and step 4 two passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.errors import BadStep, CheckpointError, did_you_mean
from minimegatron.kernels import ops
from minimegatron.kernels.optimizer import Tables
from minimegatron.optim.clip import GradStats, SquaredNorms, clip_coefficient, grad_stats, squares_of
from minimegatron.optim.main_params import MainParam, Ready, Update
from minimegatron.optim.scaler import GradScaler


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of one step; equal on all ranks.

    Attributes:
        successful: whether weights were updated.
        grad_norm: norm of the whole gradient, unscaled, before clipping; None when it is not finite.
        num_zeros: elements of the gradient that are 0; None unless `log_num_zeros_in_grad`.
        found_inf: whether any gradient on any rank has a NaN or an infinity.
        loss_scale: the loss scale of these gradients.
    """

    successful: bool
    grad_norm: float | None
    num_zeros: int | None
    found_inf: bool
    loss_scale: float


class MixedPrecisionOptimizer:
    """The optimizer of one rank, as in the module docstring. Build it when the parameters are on their device.

    Args:
        params: the parameters that this rank updates.
        config: the algorithm and its numbers. Learning rate and weight decay are those of the groups at the time of the
            step; a scheduler writes them there.
        mesh: decisions are taken over `mesh.world`.
        update: computes steps 4 to 6.
        scaler: loss scale, or None.
        kernels: `config.kernels` of the model, for the norms of gradients.
        publish: called after the weights of this rank were updated; sends them to the other replicas.
    """

    def __init__(
        self,
        params: Sequence[MainParam],
        config: OptimizerConfig,
        mesh: Mesh,
        update: Update,
        scaler: GradScaler | None = None,
        kernels: str = "torch",
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        self.params = list(params)
        self.config = config
        self.mesh = mesh
        self.scaler = scaler
        self._publish = publish
        names = [p.name for p in self.params]
        assert len(set(names)) == len(names), "two parameters have one logical name"
        self._update = update
        self._squared_norms = partial(ops.squared_norms, tables=Tables(), kernels=kernels)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's parameter groups: with weight decay (`wd_mult` 1), without (0), and those of `optim/groups`."""
        return self._update.param_groups

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss, on which to call `backward`."""
        return loss * self.loss_scale if self.scaler else loss

    def zero_grad(self) -> None:
        """Drop `param.grad`. `param.main_grad` belongs to the DDP buffer and is zeroed there."""
        for p in self.params:
            p.model.grad = None

    @torch.no_grad()
    def step(self) -> StepResult:
        """Take one step; all ranks must call it. The gradients are consumed: they may be scaled and clipped afterwards.

        Raises:
            BadStep: on all ranks together, when a gradient is not finite, there is no grad scaler, and
                `check_for_nan_in_loss_and_grad` is on. Nothing was updated. With the check off the step is skipped.
        """
        with trace.span("optimizer_step"):
            ready = [(p, grad) for p in self.params if (grad := p.read_grad()) is not None]
            log_zeros = self.config.log_num_zeros_in_grad
            norm, num_zeros, nonfinite = look(ready, self.mesh, log_zeros, self._squared_norms).to_host()
            scale = self.loss_scale
            if self.scaler:
                self.scaler.update(nonfinite > 0)
            if nonfinite:
                if self.scaler is None and self.config.check_for_nan_in_loss_and_grad:
                    raise self._not_finite(ready, nonfinite)
                return StepResult(False, None, None, True, scale)
            clip = clip_coefficient(norm / scale, self.config.clip_grad) if self.config.clip_grad > 0 else 1.0
            self._update.step(ready, clip / scale)  # steps 4 to 6
            self._publish()
            return StepResult(True, norm / scale, int(num_zeros) if log_zeros else None, False, scale)

    def weights(self, params: Sequence[MainParam]) -> list[torch.Tensor]:
        """What the update of these parameters moves, in fp32: main parameters, or copies where they are kept in another
        form."""
        return [self._update.tensors(p).get("fp32_param", p.main).detach().float() for p in params]

    def squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of squares of each tensor, [n] in fp64, by the kernel of the gradient's norm."""
        return squares_of(tensors, self._squared_norms)

    def _not_finite(self, ready: list[tuple[MainParam, torch.Tensor]], nonfinite: int) -> BadStep:
        """The error, with those of the parameters that this rank has."""
        bad = [p.name for p, grad in ready if not grad.isfinite().all()]
        named = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        return BadStep(
            f"{nonfinite} gradient tensors (over all ranks) hold NaN or infinity",
            where=f"rank {self.mesh.rank} at {self.mesh.coordinates}: {named or 'none here'}",
            fix="lower the learning rate or look for the first bad batch; "
            "--no-check-for-nan-in-loss-and-grad skips such steps",
        )

    def reload_model_params(self) -> None:
        """Make the main parameters equal to the model's; call after loading weights without optimizer state."""
        with torch.no_grad():
            for p in self.params:
                self._update.reload(p)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors} of this rank: main parameters that are copies, and moments."""
        return self._update.held()

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive a restart.

        Returns:
            `state`: logical name -> tensors of this rank's part of the parameter (`exp_avg`, `exp_avg_sq` and a scalar
            `step`, or `momentum_buffer`; `fp32_param` where main is a copy): references, and fp32 copies of what is
            kept in fewer bits. `grad_scaler`: its state, {} without one. The learning rate and weight decay are the
            scheduler's.
        """
        state = {p.name: self._update.tensors(p) for p in self.params}
        return {"state": state, "grad_scaler": self.scaler.state_dict() if self.scaler else {}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of an optimizer over the same parameters, in any order; or from the one that
        this optimizer has given and a reader has filled.

        Raises:
            CheckpointError: a parameter or tensor is missing, unknown or of another shape, or the precision differs;
                nothing has changed then.
        """
        saved = state["state"]
        own = {p.name: {key: t.shape for key, t in self._update.tensors(p).items()} for p in self.params}
        _check_same({name: {key: t.shape for key, t in tensors.items()} for name, tensors in saved.items()}, own)
        if state["grad_scaler"] and not (self.scaler and self.scaler.state_dict()):
            raise CheckpointError(
                "the checkpoint was trained with a dynamic loss scale, this run has none",
                fix="resume in fp16 with a dynamic scale, or load the weights without the optimizer",
            )
        if self.scaler:
            self.scaler.load_state_dict(state["grad_scaler"])
        for p in self.params:
            self._update.load(p, saved[p.name])
        self._publish()


def look(ready: Ready, mesh: Mesh, count_zeros: bool = False, squared_norms: SquaredNorms | None = None) -> GradStats:
    """Step 2: statistics of the gradients of all ranks; every rank must call."""
    counted = [(grad, p.counts_here) for p, grad in ready]
    return grad_stats(counted, mesh.world, count_zeros=count_zeros, device=mesh.device, squared_norms=squared_norms)


def _check_same(saved: Mapping[str, dict[str, torch.Size]], own: Mapping[str, dict[str, torch.Size]]) -> None:
    """Refuse a state whose names or shapes are not those of this optimizer."""
    problems = [f"missing {name}" for name in own.keys() - saved.keys()]
    problems += [f"unexpected {n} {did_you_mean(n, own)}".rstrip() for n in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        theirs, ours = ({key: tuple(shape) for key, shape in one[name].items()} for one in (saved, own))
        if theirs != ours:
            problems.append(f"{name} has {theirs}, this run wants {ours}")
    if problems:
        shown = sorted(problems)[:12] + ([f"and {len(problems) - 12} more"] if len(problems) > 12 else [])
        raise CheckpointError(
            "the optimizer state does not fit the model:\n  " + "\n  ".join(shown),
            fix="resume with the same model, optimizer and precision, or load the weights without the optimizer",
        )
