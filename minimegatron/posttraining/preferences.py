"""Losses of pairs: the chosen answer w should be likelier than the rejected answer l, beside a frozen reference.

    r(y) = sum over the tokens of y of  log pi(y_t) - log pi_ref(y_t)          log-ratio of an answer
    m    = beta (r(w) - r(l))                                                  margin of its implicit rewards

| `--dpo-loss-type` | loss of a pair                                              | from                            |
|-------------------|-------------------------------------------------------------|---------------------------------|
| `sigmoid`         | -(1 - e) log sigmoid(m) - e log sigmoid(-m)                 | Rafailov 2023; e: cDPO          |
| `hinge`           | max(0, 1 - m)                                               | SLiC, Zhao 2023                 |
| `ipo`             | (r(w)/|w| - r(l)/|l| - 1/(2 beta))^2                        | Azar 2023, as TRL normalises it |
| `ipo_sum`         | (r(w) - r(l) - 1/(2 beta))^2                                | the paper's formula; OpenRLHF   |

The loss at the beginning, where the policy is the reference, is log 2 for `sigmoid`, and its gradient is
-(beta / 2) (grad log pi(w) - grad log pi(l)): a test holds both.

Rafailov et al. 2023 (arXiv 2305.18290); Azar et al. 2023 (arXiv 2310.12036); Zhao et al. 2023 (arXiv 2305.10425).
Megatron-LM has none. TRL: `trl/trainer/dpo_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _sigmoid(ratios: torch.Tensor, lengths: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    margin = beta * (ratios[..., 0] - ratios[..., 1])
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _hinge(ratios: torch.Tensor, lengths: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    return (1 - beta * (ratios[..., 0] - ratios[..., 1])).relu()


def _ipo(ratios: torch.Tensor, lengths: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    return _ipo_sum(ratios / lengths, lengths, beta, smoothing)


def _ipo_sum(ratios: torch.Tensor, lengths: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    return (ratios[..., 0] - ratios[..., 1] - 1 / (2 * beta)) ** 2


PairLoss = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
LOSSES: dict[str, PairLoss] = {"sigmoid": _sigmoid, "hinge": _hinge, "ipo": _ipo, "ipo_sum": _ipo_sum}


def preference_loss(
    ratios: torch.Tensor, lengths: torch.Tensor, kind: str = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The loss of each pair.

    Args:
        ratios: [..., 2], the log-ratios r(w) and r(l).
        lengths: [..., 2], how many tokens of each answer count.
        kind: a row of the table above.
        beta, label_smoothing: see there.

    Returns:
        [...].
    """
    return LOSSES[kind](ratios, lengths, beta, label_smoothing)
