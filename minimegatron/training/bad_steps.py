"""Steps whose numbers cannot be trusted: found by all ranks together, and what is done then.

The problem in a sentence: one bad batch, or one broken wire, can end in weights that no later batch mends, and a run
that stops at every NaN stops at night.

A step is *bad* when its loss or a gradient is not finite, when its loss is a spike: above `--spiky-loss-factor` times
the mean of the last `WINDOW` good ones, or when there is none: all labels of the batch are masked. It is decided before
the optimizer moves, from sums over all ranks that every rank has received in the same message, so that no rank decides
alone. An overflow in fp16 with a dynamic
scale is no bad step: the scaler expects it.

| `--bad-step` | then                                                                                              |
|--------------|---------------------------------------------------------------------------------------------------|
| `stop`       | exit status 6                                                                                     |
| `skip`       | the weights stay; the run goes on with the next batch                                             |
| `rollback`   | the newest checkpoint of `--save` is loaded, and the run goes on with the batch after the bad one |

After a rollback the batches between the checkpoint and the bad one are not seen again: trained on in the same order,
they would lead to the same place. `ROLLBACKS` of them to one checkpoint and the run stops.

Chowdhery et al. 2022 (arXiv 2204.02311), section 5.1: PaLM went back about 100 steps at each spike and left out 200 to
500 batches. Megatron-LM: `--check-for-spiky-loss` in `megatron/core/rerun_state_machine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minimegatron.errors import BadStep

WINDOW, ROLLBACKS = 16, 3


def refuse_spike(losses: Mapping[str, float], recent: Sequence[float], factor: float | None) -> None:
    """Compare the losses of a step, summed, with those of the good ones before it.

    Args:
        losses: of this step, equal on all ranks.
        recent: of the last good steps.
        factor: how many times their mean is too much; None compares nothing.

    Raises:
        BadStep: it is a spike.
    """
    if factor is None or len(recent) < WINDOW:
        return
    total, mean = sum(losses.values()), sum(recent) / len(recent)
    if total > factor * mean:
        raise BadStep(
            f"the loss is {total:.6g}, {total / mean:.3g} times the mean of the last {len(recent)} good steps",
            fix="look at the samples of this step; --bad-step skip or rollback goes on without them",
        )


def with_latest(recent: Sequence[float], losses: Mapping[str, float]) -> list[float]:
    """The losses of the last good steps, this one included."""
    return [*recent, sum(losses.values())][-WINDOW:]
