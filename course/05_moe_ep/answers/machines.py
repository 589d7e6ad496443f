from labkit.answers import Edit, Same

_MISSED = "math.comb(experts - experts // machines, k) / math.comb(experts, k)"
_WORTH = "grouped.topk(k // most, -1).values.sum(-1)"
_FILL = "grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)"
_DIFFERENT = (
    "Each of the k is drawn here from all E experts. They are different: once an expert is taken, fewer are left for "
    "the next, and a token is spread over more machines."
)

WRONG = [
    Edit(_MISSED, "(1 - 1 / machines) ** k", mistake=_DIFFERENT),
    Edit(f"machines * (1 - {_MISSED})", "k * (1 - 1 / machines)",
         mistake="Those are the rows for experts of other machines. Asked is on how many machines the k experts lie: "
         "two on one machine count once."),
    Edit(f"machines * (1 - {_MISSED})", "min(k, machines)",
         mistake="That is the most there can be. Asked is the mean over all sets of k experts."),
    Edit(f"machines * (1 - {_MISSED})", f"1 - {_MISSED}",
         mistake="That is the chance that one given machine holds some of them. There are M machines."),
    Edit(f"machines * (1 - {_MISSED})", f"(machines - 1) * (1 - {_MISSED})",
         mistake="The token's own machine counts, too: asked is on how many machines its experts lie."),
    Edit(_WORTH, "grouped.exp().topk(k // most, -1).values.sum(-1)"),
    Edit(f"machines * (1 - {_MISSED})", f"min(k, machines) * (1 - {_MISSED})",
         mistake="A token may have experts on any of the M machines: M times the chance, also where k is smaller."),
    Edit(_FILL, "grouped.flatten(1)",
         mistake="Nothing keeps the token on few machines: those are the k highest scores of all."),
    Edit(_WORTH, "grouped.amax(-1)",
         mistake="A machine is worth the sum of its k/most highest scores, not its highest alone."),
    Edit(_WORTH, "grouped.sum(-1)", mistake="A machine is worth the sum of its k/most highest scores, not of all."),
    Edit(_WORTH, "grouped.mean(-1)", mistake="A machine is worth the sum of its k/most highest scores, not of all."),
    Edit("grouped.topk(k // most, -1)", "grouped.topk(min(k, grouped.shape[-1]), -1)",
         mistake="A machine is worth the sum of its k/most highest scores, and k/most of them only."),
    Edit(_FILL, "grouped.masked_fill(~allowed[..., None], 0.0).flatten(1)",
         mistake="The experts of other machines have the score 0 here. Where the allowed ones have scores below 0, "
         "they win."),
    Edit(_FILL, "(grouped * allowed[..., None]).flatten(1)",
         mistake="The experts of other machines have the score 0 here. Where the allowed ones have scores below 0, "
         "they win."),
    Edit("scores.unflatten(1, (machines, -1))", "scores.unflatten(1, (-1, machines)).transpose(1, 2)",
         ("-torch.inf).flatten(1)", "-torch.inf).transpose(1, 2).flatten(1)"),
         mistake="Experts lie on machines in one piece: machine 0 has the first E/M."),
    Edit("grouped.topk(k // most, -1)", "grouped.topk(min(2, grouped.shape[-1]), -1)",
         mistake="A machine is worth the sum of its k/most highest scores. These are two for DeepSeek-V3, with k = 8 "
         "and `most` = 4, and another number elsewhere."),
    Edit(_FILL, "grouped.masked_fill(~allowed[..., None] | (grouped < grouped.topk(k // most, -1).values[..., -1:]), "
         "-torch.inf).flatten(1)",
         mistake="Each allowed machine gives its k/most best experts here. The token takes the k best of all allowed "
         "ones: one machine may give more than k/most, another one fewer."),
    Edit("math.comb(experts - experts // machines, k)", "math.comb(experts // machines, k)",
         mistake="C(E/M, k) counts the sets that lie in one given machine. Count those that have no expert there."),
    Edit("worth.topk(most, -1)", "worth.topk(most, -1, largest=False)"),
    Edit("scores.topk(k, -1)", "scores.topk(most, -1)"),
    Edit("dtype=torch.bool).scatter(1, scores.topk", "dtype=torch.float32).scatter(1, scores.topk"),
    Edit("allowed = ", "allowed = worth >= worth.topk(most, -1).values[:, -1:]\n    _ = ",
         mistake="Where several machines are worth the same, all of them are allowed here, more than `most`."),
    Edit("    return torch.zeros_like(scores", "    return scores >= scores.topk(k, -1).values[:, -1:]\n"
         "    return torch.zeros_like(scores",
         mistake="Where several scores are as high as the k-th, all of these experts are taken here. A token goes to "
         "exactly k."),
]

RIGHT = [
    Edit(_MISSED, "math.prod((experts - experts // machines - i) / (experts - i) for i in range(k))"),
]

EQUIVALENT = [
    Same("line 8: rounded up for down", "machines have equally many experts"),
    Same("line 14: `mean` for `sum`", "of as many scores the mean is in the same order as the sum"),
    Same("line 14: rounded up for down", "`most` divides k"),
]


# %% right: the mean by counting machine by machine; the choice with a loop over tokens
import math
import torch

def machines_of_a_token(experts, k, machines):
    local, every = experts // machines, math.comb(experts, k)
    some = sum(math.comb(local, n) * math.comb(experts - local, k - n) for n in range(1, min(k, local) + 1))
    return machines * some / every

def near(scores, k, machines, most):
    local = scores.shape[1] // machines
    map = torch.zeros(scores.shape, dtype=torch.bool)
    for t, row in enumerate(scores.tolist()):
        of = [range(m * local, (m + 1) * local) for m in range(machines)]
        worth = [sum(sorted((row[e] for e in one), reverse=True)[: k // most]) for one in of]
        best = sorted(range(machines), key=lambda m: -worth[m])[:most]
        allowed = sorted((e for m in best for e in of[m]), key=lambda e: -row[e])
        map[t, allowed[:k]] = True
    return map


# %% right: exact fractions; NumPy
from fractions import Fraction
import numpy as np
import torch

def machines_of_a_token(experts, k, machines):
    none = Fraction(1)
    for i in range(k):
        none *= Fraction(experts - experts // machines - i, experts - i)
    return float(machines * (1 - none))

def near(scores, k, machines, most):
    s = scores.numpy().astype(np.float64)
    groups = s.reshape(len(s), machines, -1)
    worth = np.sort(groups, axis=-1)[:, :, ::-1][:, :, : k // most].sum(-1)
    kept = np.argsort(-worth, axis=1, kind="stable")[:, :most]
    masked = np.full_like(groups, -np.inf)
    rows = np.arange(len(s))[:, None]
    masked[rows, kept] = groups[rows, kept]
    chosen = np.argsort(-masked.reshape(s.shape), axis=1, kind="stable")[:, :k]
    out = np.zeros(s.shape, dtype=bool)
    out[rows, chosen] = True
    return torch.from_numpy(out)


# %% right: gather the scores of the allowed machines, then choose among them
import math
import torch

def machines_of_a_token(experts, k, machines):
    rest = experts - experts // machines
    log_none = (math.lgamma(rest + 1) - math.lgamma(rest - k + 1) - math.lgamma(experts + 1)
                + math.lgamma(experts - k + 1)) if rest >= k else -math.inf
    return machines * (1 - math.exp(log_none))

def near(scores, k, machines, most):
    local = scores.shape[1] // machines
    numbers = torch.arange(scores.shape[1]).view(machines, local)
    worth = sum(scores.view(-1, machines, local).sort(-1, descending=True)[0][:, :, i] for i in range(k // most))
    mine = numbers[worth.topk(most).indices].flatten(1)
    best = mine.gather(1, scores.gather(1, mine).topk(k).indices)
    return torch.zeros_like(scores).index_put((torch.arange(len(scores))[:, None], best), torch.tensor(1.0)).bool()
