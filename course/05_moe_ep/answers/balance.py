from labkit.answers import Edit

WRONG = [
    # counts all that are as good as the k-th
    Edit(
        "logits.topk(k, dim=-1).indices.flatten().bincount(minlength=experts)",
        "(logits >= logits.topk(k, dim=-1).values[:, -1:]).sum(0)",
        mistake="Where experts are equally good, a token still counts for exactly k of them. Here it counts for " "all that are as good as the k-th.",
    ),
    Edit("p * (price - paid)\n", "(p * (price - paid)).float()\n", mistake="The gradient is fp32, and the logits are not: it is asked for in the dtype of the logits."),
    Edit("p * (price - paid)", "price.expand_as(p).clone()", mistake="That is the gradient with respect to p. The logits are behind a softmax, which has a gradient of" " its own."),
    Edit("p * (price - paid)", "p * price", mistake="The gradient of a softmax has two terms; here is the first."),
    Edit("tokens**2", "tokens", mistake="Both the sum of p and n_e grow with the tokens: divide by T^2."),
    Edit("coeff * experts / (", "coeff / (", mistake="The factor is E / (k T^2): at an even load the loss is coeff, whatever E is."),
    Edit("(k * tokens**2)", "tokens**2", mistake="n_e counts the first choice of each token only. A token counts for k experts."),
    Edit("topk(k, dim=-1)", "topk(1, dim=-1)"),
    Edit("topk(k, dim=-1)", "topk(min(k, 2), dim=-1)"),
    Edit("logits.topk(k, dim=-1)", "logits.abs().topk(k, dim=-1)"),
    Edit("bincount(minlength=experts)", "bincount()"),
    Edit("logits.softmax(-1)", "logits.exp() / logits.exp().sum(-1, keepdim=True)"),
    Edit("logits.softmax(-1)", "logits.softmax(0)"),
    Edit("p * (price - paid)", "p * (price - paid.mean())"),
    Edit("p * (price - paid)", "p * (price - price.mean())"),
    Edit("p * (price - paid)", "p * (paid - price)"),
    Edit("p * (price - paid)", "p * (1 - p) * price"),
    Edit("paid.sum()", "paid.mean()"),
    Edit("coeff * experts", "experts"),
    # changes the caller's logits
    Edit("p = logits.softmax(-1)", "logits -= logits.amax(-1, keepdim=True); p = logits.softmax(-1)"),
    # the probabilities of the chosen experts only
    Edit(
        "    price =",
        """    p = p * torch.zeros_like(p).scatter(1, logits.topk(k, dim=-1).indices, 1.0)
    price =""",
    ),
    # gradient of a mean
    Edit(
        "return paid.sum(), p * (price - paid)",
        "return paid.sum(), p * (price - paid) / tokens",
        mistake="The loss is right; its gradient is divided by the tokens once more.",
    ),
]


# %% right: in double, with the counts from a scatter
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def balance(logits, k, coeff):
    T, E = logits.shape
    p = torch.softmax(logits.double(), 1)
    n = torch.zeros(T, E, dtype=torch.float64).scatter(1, logits.topk(k).indices, 1).sum(0)
    loss = coeff * E / (k * T * T) * (n * p.sum(0)).sum()
    c = coeff * E / (k * T * T) * n
    return loss.float(), (p * c - p * (p @ c)[:, None]).to(logits)


# %% right: NumPy
import numpy as np
import torch


def balance(logits, k, coeff):
    z = logits.numpy().astype(np.float64)
    T, E = z.shape
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    n = np.bincount(np.argsort(-z, axis=1, kind="stable")[:, :k].ravel(), minlength=E)
    c = coeff * E / (k * T * T) * n
    paid = p @ c
    return float(paid.sum()), torch.from_numpy((p * (c - paid[:, None])).astype(logits.numpy().dtype))


# %% right: torch.func in place of the formula
import torch


def balance(logits, k, coeff):
    T, E = logits.shape
    n = torch.zeros_like(logits).scatter(1, logits.topk(k).indices, 1.0).sum(0)
    grad, loss = torch.func.grad_and_value(lambda x: coeff * E / (k * T * T) * (x.softmax(-1).sum(0) * n).sum())(logits)
    return loss, grad


# %% right: torch.func.vjp
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    n = torch.zeros(E, dtype=logits.dtype).index_add(0, logits.topk(k).indices.flatten(), torch.ones(T * k, dtype=logits.dtype))

    def loss(z):
        return coeff * E / (k * T * T) * (n * z.softmax(-1).sum(0)).sum()

    value, back = torch.func.vjp(loss, logits)
    return value, back(torch.ones_like(value))[0]


# %% wrong: a step down
# mistake: That is a step down. Asked is the gradient, which points up.
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    c = coeff * E / (k * T * T) * n
    return (p * c).sum(), -p * (c - (p @ c)[:, None])


# %% wrong: gradient of the counts
# mistake: n_e counts tokens, k for each. It is a number without a gradient, not a sum of probabilities.
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    m = p.mean(0)
    c = 2 * coeff * E * m / T
    return coeff * E * (m * m).sum(), p * (c - (p * c).sum(-1, keepdim=True))


# %% wrong: of counts alone
# mistake: That is a loss of counts alone: n_e times n_e. One of the two factors is the sum of p.
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    share = n / (k * T)
    c = coeff * E / (k * T * T) * n
    return coeff * E * (share**2).sum(), p * (c - (p @ c)[:, None])


# %% wrong: paid by the chosen
# mistake: Here a token pays only for the experts that it chose. The sum over t holds the p of all tokens, chosen or not.
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    m = torch.zeros_like(p).scatter(1, logits.topk(k).indices, 1.0)
    c = coeff * E / (k * T * T) * m.sum(0)
    g = m * c
    return (p * g).sum(), p * (g - (p * g).sum(-1, keepdim=True))


# %% wrong: price over the plain mean
# mistake: The price is compared with the plain mean of all prices. Compare it with what the token pays: the mean weighted by its p.
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    c = coeff * E / (k * T * T) * n
    return (p * c).sum(), p * (c - c.mean())


# %% wrong: softmax over the chosen
# mistake: Here p is the softmax over the chosen experts. The balancing loss takes it over *all* of them: experts that are not chosen must learn, too, that they are cheap.
import torch


def balance(logits, k, coeff):
    tokens, experts = logits.shape
    best = logits.topk(k, dim=-1)
    p = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
    counts = best.indices.flatten().bincount(minlength=experts)
    price = coeff * experts / (k * tokens**2) * counts
    paid = (p * price).sum(-1, keepdim=True)
    return paid.sum(), p * (price - paid)
# %% wrong: autograd
# told: no autograd here
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def balance(logits, k, coeff):
    x = logits.clone().requires_grad_()
    T, E = x.shape
    n = x.topk(k).indices.flatten().bincount(minlength=E)
    loss = coeff * E / (k * T * T) * (x.softmax(-1).sum(0) * n).sum()
    loss.backward()
    return loss, x.grad


