from labkit.answers import Edit

_LEFT = "(a[:, :, None] - a[:, None]).masked_fill(later, -torch.inf).exp()"

WRONG = [
    Edit(".triu(1)", ".triu(2)", mistake="Token i sees itself and what is before it; you let it see the next one."),
    Edit(".triu(1)", ".triu(0)", mistake="A token reads what it has written itself: the diagonal counts, with weight 1."),
    Edit(".masked_fill(later, -torch.inf)", "", mistake="No token may read a later one: where j > i the weight is 0."),
    Edit("(a[:, :, None] - a[:, None])", "(a[:, :, None] - a[:, None] + (dt * A).mT[:, None])",
         mistake="What token j wrote fades at the tokens after it, j + 1 to i, and not at its own."),
    Edit("(a[:, :, None] - a[:, None])", "a[:, :, None]",
         mistake="That is the decay since the beginning. What token j wrote fades from j on: a_i - a_j."),
    Edit("(dt * A).cumsum(0)", "A.expand_as(dt).cumsum(0)",
         mistake="The decay depends on the token: its logarithm is dt_t A."),
    Edit("(dt[..., None] * x)", "x", mistake="The values are dt_j x_j: dt counts in what is written, too."),
    Edit("C @ B.mT", "B @ C.mT", mistake="C are the queries, B the keys: row i is of C_i, column j of B_j."),
    Edit(_LEFT, "a[:, :, None].exp() * (-a[:, None]).exp() * ~later",
         mistake="With strong decays e^(-a_j) overflows: subtract first, exp once."),
    Edit(_LEFT, "(a[:, :, None].exp() * (-a[:, None]).exp()).masked_fill(later, 0.0)",
         mistake="With strong decays e^(-a_j) is infinite and e^(a_i) is 0: subtract first, exp once."),
    Edit(_LEFT, "(a[:, :, None].exp() / a[:, None].exp()).masked_fill(later, 0.0)",
         mistake="With strong decays e^(a_i) and e^(a_j) are both 0, and 0/0 is no number: subtract first, exp once."),
    Edit("C @ B.mT", "C @ B.mT / B.shape[1] ** 0.5",
         mistake="Nothing is divided by the root of n here: the weight is C_i · B_j times the decay."),
    Edit(_LEFT, "(a[:, :, None] - a[:, None]).exp() * ~later",
         mistake="Above the diagonal e^(a_i - a_j) overflows, and infinity times 0 is no number: mask before exp."),
    Edit("(left * (C @ B.mT))", "(left * (C @ B.mT)).softmax(-1)",
         mistake="There is no softmax: the decays stand in its place."),
]


# %% right: one einsum, differences by where
import torch

def as_attention(x, dt, A, B, C):
    a = torch.cumsum(A * dt, 0)
    at = torch.arange(len(x))
    seen = (at[:, None] >= at)[..., None]
    logs = torch.where(seen, a[:, None] - a[None], torch.full((), -torch.inf, dtype=a.dtype))
    return torch.einsum("ij,ijh,jh,jhp->ihp", C @ B.T, logs.exp(), dt, x)


# %% right: head by head
import torch

def as_attention(x, dt, A, B, C):
    pairs, y = C @ B.T, torch.empty_like(x)
    for i in range(x.shape[1]):
        a = torch.cumsum(dt[:, i] * A[i], 0)
        logs = (a[:, None] - a).clamp(max=0)
        y[:, i] = torch.tril(logs.exp() * pairs) @ (dt[:, i, None] * x[:, i])
    return y


# %% right: sums of segments, no differences
import torch

def as_attention(x, dt, A, B, C):
    s = len(x)
    g = (dt * A).T[:, :, None].expand(-1, s, s)
    below = torch.ones(s, s).tril(-1).bool()
    sums = g.masked_fill(~below, 0).cumsum(1)
    left = sums.masked_fill(~torch.ones(s, s).tril().bool(), -torch.inf).exp()
    weights = left * (C @ B.T)
    return torch.bmm(weights * dt.T[:, None], x.permute(1, 0, 2)).permute(1, 0, 2)


# %% right: rows before the values, dt in the weights
import torch

def as_attention(x, dt, A, B, C):
    a = (dt * A).cumsum(0)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).tril().logical_not()
    left = (a.unsqueeze(1) - a.unsqueeze(0)).masked_fill(hidden[..., None], float("-inf")).exp()
    weights = left * dt.unsqueeze(0) * (C @ B.T).unsqueeze(-1)
    return (weights.unsqueeze(-1) * x.unsqueeze(0)).sum(1)


# %% wrong: token by token
# told: no loop over tokens
import torch

def as_attention(x, dt, A, B, C):
    h, y = x.new_zeros(*x.shape[1:], B.shape[1]), torch.empty_like(x)
    for t in range(len(x)):
        h = torch.exp(dt[t] * A)[:, None, None] * h + (dt[t][:, None] * x[t])[:, :, None] * B[t]
        y[t] = h @ C[t]
    return y
