from labkit.answers import Edit, Same

_MEAN = "(p * slopes[name]) @ scores"

WRONG = [
    Edit(_MEAN, "(p * (slopes[name] + values[name])) @ scores",
         mistake="This is the gradient of the mean: it also moves the chances of the draws, and those are over when the loss is computed."),
    Edit(_MEAN, "(p * values[name]) @ scores", mistake="This weighs the draws by the estimate, as a reward does. A loss is differentiated: its slope counts."),
    Edit("(p * values[name]).sum()", "values[name].mean()", mistake="The mean is over draws of the policy: a word counts by its chance."),
    Edit(_MEAN, "slopes[name] @ scores", mistake="The gradients are averaged over the draws, each word by its chance."),
    Edit("log_ref - log_p", "log_p - log_ref", mistake="d is the other way round: log of the reference minus log of the policy."),
    Edit(" - p  # row x", "  # row x", mistake="A log-probability has a gradient in all logits: the other words' go down."),
    Edit('"k2": -d, "k3": 1', '"k2": d, "k3": 1', mistake="k2 leads the wrong way: where the policy is above the reference, d is negative."),
    Edit('"k3": 1 - d.exp()}  #', '"k3": d.exp() - 1}  #', mistake="k3 leads the wrong way: d falls when log p(x) rises."),
    Edit("policy.log_softmax(0), reference.log_softmax(0)", "policy, reference", mistake="Logits are no log-probabilities: they must be normalised first."),
    Edit("(p * values[name])", "(log_ref.exp() * values[name])", ("(p * slopes", "(log_ref.exp() * slopes"),
         mistake="The draws are the policy's, not the reference's."),
    Edit("d**2 / 2", "d**2", mistake="k2 is half of the square of d."),
    Edit("d.exp() - d - 1", "d.exp() - 1", mistake="k3 has a -d as well: exp(d) - d - 1."),
    Edit('torch.ones_like(d), "k2": -d, "k3": 1 - d.exp()}', '-torch.ones_like(d), "k2": d, "k3": d.exp() - 1}', mistake="These are slopes with respect to d. d falls when log p(x) rises, so k2 and k3 lead the wrong way."),
]

_ONE_DIM = "logits here have one dim"
_ZERO = "a constant times the gradient of log p(x) is 0 on average"
EQUIVALENT = [
    Same("log_p, log_ref = policy.log_softmax(-1), reference.log_softmax(0)", _ONE_DIM),
    Same("log_p, log_ref = policy.log_softmax(0), reference.log_softmax(-1)", _ONE_DIM),
    Same('slopes = {"k1": torch.ones_like(d), "k2": -d, "k3": 0 - d.exp()}  # with respect to log p(x)', _ZERO),
    Same('slopes = {"k1": torch.ones_like(d), "k2": -d, "k3": 2 - d.exp()}  # with respect to log p(x)', _ZERO),
    Same("scores = torch.eye(len(p)) - p  # row x: the gradient of log p(x)", "a difference takes the wider of two dtypes"),
]


# %% right: autograd, word by word
import torch


def kl_estimates(policy, reference):
    found, chances = {}, policy.softmax(0)
    for name in ("k1", "k2", "k3"):
        mean, slope = 0.0, torch.zeros_like(policy)
        for word in range(len(policy)):
            with torch.enable_grad():
                z = policy.detach().clone().requires_grad_()
                d = reference.log_softmax(0)[word] - z.log_softmax(0)[word]
                one = -d if name == "k1" else d * d / 2 if name == "k2" else torch.expm1(d) - d
                one.backward()
            mean = mean + chances[word] * one.detach()
            slope = slope + chances[word] * z.grad
        found[name] = (mean, slope)
    return found


# %% right: all words at once, the chances detached
import torch


def kl_estimates(policy, reference):
    def one(estimate):
        with torch.enable_grad():
            z = policy.detach().clone().requires_grad_()
            mean = (z.softmax(0).detach() * estimate(torch.log_softmax(reference, 0) - torch.log_softmax(z, 0))).sum()
            mean.backward()
        return mean.detach(), z.grad
    return {"k1": one(lambda d: -d), "k2": one(lambda d: 0.5 * d.pow(2)), "k3": one(lambda d: d.exp() - d - 1)}


# %% right: what comes out, by formula
import torch


def kl_estimates(policy, reference):
    p, q = policy.softmax(0), reference.softmax(0)
    log = policy.log_softmax(0) - reference.log_softmax(0)
    kl = (p * log).sum()
    return {
        "k1": (kl, torch.zeros_like(p)),
        "k2": ((p * log.square()).sum() / 2, p * (log - kl)),
        "k3": (kl, p - q),
    }
