from labkit.answers import Edit, Same

_MOVED = "(log_probs - old).masked_fill(mask == 0, 0.0)"
_GAIN = "torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)"
_NOTHING = "Where the mask is 0 there may be no number, and 0 times nothing is no number either, forward or backward."

WRONG = [
    Edit(_MOVED, "(log_probs - old)", ('if level == "sequence":', 'if level == "sequence":\n        moved = moved * mask'), mistake=_NOTHING),
    Edit(_MOVED, "((log_probs - old) * mask)", mistake=_NOTHING),
    Edit(_GAIN, "ratio * advantages", mistake="Nothing is clipped: a ratio that has moved far keeps its gradient."),
    Edit(_GAIN, "ratio.clamp(1 - low, 1 + high) * advantages",
         mistake="It is clipped on both sides. A good token that has become less likely, or a bad one that has become likelier, keeps its gradient."),
    Edit("torch.minimum(ratio", "torch.maximum(ratio", mistake="The smaller of the two gains counts: otherwise the clip only ever helps."),
    Edit("clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)", mistake="The two limits are exchanged: below 1 it is low, above 1 it is high."),
    Edit("clamp(1 - low, 1 + high)", "clamp(1 - low, 1 + low)", mistake="Above 1 the limit is high, which may be another number."),
    Edit("return -gain", "return gain", mistake="A loss is minimised: it is minus the gain."),
    Edit("        moved = (moved.sum(1, keepdim=True) / drawn)", "        moved = (moved.sum(1, keepdim=True))",
         mistake="The ratio of an answer is the geometric mean of its tokens' ratios, not their product."),
    Edit("mask.sum(1, keepdim=True).clamp(min=1)", "mask.shape[1]", mistake="The mean is over the tokens that were drawn, not over all places of the row."),
    Edit("moved = (moved.sum(1, keepdim=True) / drawn).expand_as(moved)", "moved = (moved.sum() / mask.sum()).expand_as(moved)",
         mistake="Each row is an answer, and has a ratio of its own."),
    Edit("    ratio = moved.exp()", "    ratio = moved.exp()\n    if level == 'sequence':\n        ratio = ((log_probs - old).masked_fill(mask == 0, 0.0).exp() * mask).sum(1, keepdim=True).div(drawn).expand_as(moved)",
         mistake="The arithmetic mean of the ratios is not their geometric mean: the mean is of the logarithms."),
    Edit("-gain.masked_fill(mask == 0, 0.0)", "-gain", mistake="Tokens that were not drawn have the loss 0."),
    Edit(_MOVED, "(log_probs.detach() - old).masked_fill(mask == 0, 0.0)", mistake="The ratio is made of two detached numbers: the loss is right, and has no gradient."),
    Edit("moved = (moved.sum(1, keepdim=True) / drawn).expand_as(moved)", "moved = moved - moved.detach() + (moved.detach().sum(1, keepdim=True) / drawn)",
         mistake="All tokens of an answer share its ratio, so each of them moves the losses of all."),
    Edit("(log_probs - old)", "(old - log_probs)", mistake="The ratio is the wrong way round: it is π over the π_old that drew."),
    Edit("ratio = moved.exp()", "ratio = moved", mistake="The ratio is exp of the difference of the log-probabilities."),
    Edit(_GAIN, "ratio.clamp(max=1 + high) * advantages", mistake="For A < 0 the limit is the lower one: the gain ends at 1 - low, and has no limit above."),
    Edit("return -gain", "gain = gain / drawn if level == 'sequence' else gain\n    return -gain", mistake="Asked is the loss of each token: it is not divided by the number of tokens."),
]

EQUIVALENT = [
    Same("drawn = mask.sum(1, keepdim=True).clamp(min=0)", "every row of a trial has a token that was drawn"),
    Same("drawn = mask.sum(1, keepdim=True)", "every row of a trial has a token that was drawn"),
]


# %% right: where, and the cases written out
import torch


def policy_loss(log_probs, old, advantages, mask, low, high, level):
    zero = torch.zeros_like(old)
    moved = torch.where(mask > 0, log_probs, zero) - torch.where(mask > 0, old, zero)
    if level == "sequence":
        moved = (moved.sum(1) / mask.sum(1))[:, None] + zero
    ratio = torch.exp(moved)
    stopped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    limit = torch.where(advantages > 0, 1 + high, 1 - low)
    return torch.where(mask > 0, torch.where(stopped, -limit * advantages, -ratio * advantages), zero)


# %% right: PPO's two losses and the larger of them
import torch


def policy_loss(log_probs, old, advantages, mask, low, high, level):
    off = mask < 0.5
    log_probs, old = log_probs.masked_fill(off, -1.0), old.masked_fill(off, -1.0)
    log_ratio = log_probs - old
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / (~off).sum(-1, keepdim=True)
    ratio = log_ratio.exp() * torch.ones_like(mask)
    one, two = -advantages * ratio, -advantages * torch.clamp(ratio, 1.0 - low, 1.0 + high)
    return torch.max(one, two).masked_fill(off, 0)


# %% right: row by row over the tokens that were drawn
import torch


def policy_loss(log_probs, old, advantages, mask, low, high, level):
    rows = []
    for row in range(len(mask)):
        at = mask[row].nonzero().flatten()
        moved = log_probs[row, at] - old[row, at]
        if level == "sequence":
            moved = moved.mean().expand(len(at))
        ratio, a = moved.exp(), advantages[row, at]
        loss = -torch.min(ratio * a, torch.clip(ratio, 1 - low, 1 + high) * a)
        rows.append(torch.zeros_like(old[row]).index_put((at,), loss))
    return torch.stack(rows)
