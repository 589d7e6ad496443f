from labkit.answers import Edit, Same

_MOVED = "(trainer - engine).detach().masked_fill(mask == 0, 0.0)"
_WEIGHTS = 'q.clamp(max=limit) if what == "truncate" else torch.where(q > limit, 0.0, q)'

WRONG = [
    Edit("(trainer - engine)", "(engine - trainer)", mistake="The ratio is the wrong way round: a token that the engine draws too often must weigh less."),
    Edit(".detach()", "", mistake="A gradient flows through the weights: they are numbers, beside the loss."),
    Edit(_MOVED, "(trainer - engine).detach() * mask", mistake="What nobody drew has no number in the engine: 0 times infinity is not 0."),
    Edit("moved.sum(1, keepdim=True)", "moved.mean(1, keepdim=True)", mistake="The ratio of an answer is the product over its tokens: their logarithms are summed, not averaged."),
    Edit("torch.where(q > limit, 0.0, q)", "q * (q <= limit)", mistake="The ratio of a long answer may be infinite for a float, and infinity times 0 is no number."),
    Edit(_WEIGHTS, "q.clamp(max=limit)", mistake="By mask a ratio beyond the limit counts as 0, not as the limit."),
    Edit(_WEIGHTS, "torch.where(q > limit, 0.0, q)", mistake="By truncate a ratio beyond the limit counts as the limit, not as 0."),
    Edit("q.clamp(max=limit)", "q.clamp(1 / limit, limit)", mistake="Only large ratios are limited; a small one is no danger."),
    Edit("torch.where(q > limit, 0.0, q)", "torch.where((q > limit) | (q < 1 / limit), 0.0, q)", mistake="Only ratios above the limit are masked; a small one counts little anyway."),
    Edit("weights.masked_fill(mask == 0, 0.0)", "weights", mistake="What was not drawn has the weight 0."),
    Edit("q = moved.exp()", "q = moved.exp()\n    q = q / q.mean()", mistake="The ratios are not divided by their mean."),
    Edit("moved.sum(1, keepdim=True).expand_as(moved)", "moved.sum().expand_as(moved)", mistake="Each row is an answer, and has a ratio of its own."),
    Edit("moved.sum(1, keepdim=True).expand_as(moved)", "moved.cumsum(1)", mistake="The ratio of an answer has all of its tokens in it, those behind as well."),
    Edit("moved.sum(1, keepdim=True)", "moved.clamp(max=torch.tensor(limit).log()).sum(1, keepdim=True)", mistake="By sequence the limit is for the ratio of the answer, not for each token's."),
    Edit("q = moved.exp()", "q = moved", mistake="The ratio is exp of the difference of the log-probabilities."),
]

EQUIVALENT = [
    Same(
        'weights = q.clamp(max=limit) if what == "truncate" else torch.where((q >= limit), 0.0, q)',
        "no ratio is just the limit",
    ),
]


# %% right: limits in logarithms
import math
import torch


def importance(trainer, engine, mask, level, what, limit):
    with torch.no_grad():
        moved = torch.where(mask > 0, trainer - engine, torch.zeros_like(trainer))
        if level == "sequence":
            moved = moved.sum(-1, keepdim=True) + torch.zeros_like(moved)
        if what == "truncate":
            moved = moved.clamp(max=math.log(limit))
        else:
            moved = moved.masked_fill(moved > math.log(limit), -math.inf)
        return torch.where(mask > 0, moved.exp(), torch.zeros_like(moved))


# %% right: row by row
import torch


def importance(trainer, engine, mask, level, what, limit):
    weights = torch.zeros_like(mask)
    for row in range(len(mask)):
        at = mask[row].nonzero().flatten()
        gap = (trainer.detach()[row, at] - engine[row, at]).double()
        q = gap.sum().exp().expand(len(at)) if level == "sequence" else gap.exp()
        beyond = q > limit
        weights[row, at] = torch.where(beyond, limit if what == "truncate" else 0.0, q).to(mask.dtype)
    return weights


# %% right: minimum, and nan_to_num on what is masked
import torch


def importance(trainer, engine, mask, level, what, limit):
    gap = torch.nan_to_num(trainer.data - engine, nan=0.0, posinf=0.0, neginf=0.0)
    gap[mask == 0] = 0
    if level == "sequence":
        gap = gap.cumsum(1)[:, -1:].repeat(1, mask.shape[1])
    q = torch.exp(gap)
    kept = torch.minimum(q, torch.tensor(limit, dtype=q.dtype))
    if what == "mask":
        kept[q > limit] = 0
    kept[mask == 0] = 0
    return kept
