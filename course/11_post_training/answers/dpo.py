from labkit.answers import Edit, Same

_LOSS = "-F.logsigmoid(margin)"
_PULL = "beta * torch.sigmoid(-margin) * (F.one_hot(words, logits.shape[-1]) - log_p.exp())"
_SUM = "torch.where(counts, taken - reference, 0.0).sum(1)"

WRONG = [
    Edit(_SUM, "(torch.where(counts, taken - reference, 0.0).sum(1) / counts.sum(1))", mistake="An answer counts as a whole: its log-probability is the sum over its tokens, not their mean."),
    Edit(_SUM, "torch.where(counts, taken, 0.0).sum(1)", mistake="The reference is missing: an answer's worth is how much likelier it has become than there."),
    Edit("torch.where(counts, taken - reference, 0.0)", "((taken - reference) * counts)", mistake="What does not count may have no number in the reference: 0 times infinity is not 0."),
    Edit("torch.sigmoid(-margin)", "torch.sigmoid(margin)", mistake="The factor is large where the pair is in the wrong order, and near 0 where it is settled; here it is the other way round."),
    Edit(_PULL, _PULL.replace("beta * ", ""), mistake="The margin is beta times a difference: beta is a factor of the gradient, too."),
    Edit("[-1.0, 1.0]", "[1.0, -1.0]", mistake="The signs are exchanged: to make the loss smaller the chosen answer must become likelier."),
    Edit("[-1.0, 1.0]", "[-1.0, -1.0]", mistake="The rejected answer is pushed down: its gradient has the other sign."),
    Edit(" * counts[..., None]", "", mistake="Tokens of the prompt and of the padding have a gradient here: the loss does not depend on them."),
    Edit(_LOSS, "-torch.sigmoid(margin).log()", mistake="At a margin of -300 the sigmoid is 0 for a float, exp(-margin) infinite, and a logarithm of either as well: one function does both steps."),
    Edit("F.one_hot(words, logits.shape[-1]) - log_p.exp()", "F.one_hot(words, logits.shape[-1])", mistake="A log-probability has a gradient in all logits of its place: those of the other words go down."),
    Edit(_LOSS, "-F.logsigmoid(-margin)", mistake="The loss is small where the margin is large and positive."),
    Edit("margin = beta * (chosen - rejected)", "margin = chosen - rejected", mistake="The margin lacks beta."),
    Edit("labels.clamp(min=0)", "labels", told="-100 marks"),
    Edit("sign * pull", "0.5 * sign * pull", mistake="The gradient is half of what it is: the ½ of the example is the factor of the first link, which is there already."),
    Edit(f"return {_LOSS}", "return F.logsigmoid(margin)", mistake="The loss is minus the logarithm."),
    Edit("taken - reference", "taken + reference", mistake="The reference is subtracted: d is log π - log πref."),
    Edit(" * torch.sigmoid(-margin)", "", mistake="The factor of the first link is missing: a pair that is settled pulls hardly at all."),
    Edit(_LOSS, "torch.log(1 + torch.exp(-margin))", mistake="At a margin of -300 the sigmoid is 0 for a float, exp(-margin) infinite, and a logarithm of either as well: one function does both steps."),
    Edit("logits.log_softmax(-1)", "logits", mistake="Logits are no log-probabilities: they must be normalised first."),
    Edit(" * counts[..., None]", " * counts[..., None] / counts.sum(1)[:, None, None]", mistake="An answer counts as a whole: no link of the chain divides by the number of its tokens."),
    Edit("F.one_hot(words", "F.one_hot(labels", told="-100 marks"),
]

EQUIVALENT = [
    Same("sign = torch.tensor([-1.0, 1.0])[:, None, None]", "a product takes the wider of two dtypes"),
]


# %% right: autograd, then out of the graph
import torch
import torch.nn.functional as F


def dpo(logits, labels, reference, beta):
    with torch.enable_grad():
        z = logits.detach().clone().requires_grad_()
        losses = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view_as(labels)
        moved = (-losses - reference).masked_fill(labels == -100, 0.0).sum(1)
        loss = -F.logsigmoid(beta * (moved[0] - moved[1]))
        loss.backward()
    return loss.detach(), z.grad


# %% right: token by token
import torch


def dpo(logits, labels, reference, beta):
    sums, grad = [], torch.zeros_like(logits)
    for row in (0, 1):
        total = torch.zeros((), dtype=logits.dtype)
        for t in range(logits.shape[1]):
            word = int(labels[row, t])
            if word == -100:
                continue
            p = logits[row, t].softmax(0)
            total = total + logits[row, t, word] - torch.logsumexp(logits[row, t], 0) - reference[row, t]
            grad[row, t] = -p
            grad[row, t, word] += 1
        sums.append(total)
    margin = beta * (sums[0] - sums[1])
    loss = torch.logaddexp(torch.zeros_like(margin), -margin)
    weight = beta * torch.exp(-margin - loss)
    return loss, torch.stack([-weight * grad[0], weight * grad[1]])


# %% right: compact, with the places that count picked out
import torch
import torch.nn.functional as F


def dpo(logits, labels, reference, beta):
    row, t = (labels >= 0).nonzero(as_tuple=True)
    words, sign = labels[row, t], 1.0 - 2.0 * row
    log_p = logits[row, t].log_softmax(-1)
    margin = beta * (sign * (log_p[torch.arange(len(row)), words] - reference[row, t])).sum()
    grad = torch.zeros_like(logits)
    onehot = F.one_hot(words, logits.shape[-1]).to(logits.dtype)
    grad[row, t] = -beta * torch.sigmoid(-margin) * sign[:, None] * (onehot - log_p.exp())
    return F.softplus(-margin), grad
