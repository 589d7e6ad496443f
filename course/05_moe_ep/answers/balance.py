from labkit.answers import Edit

WRONG = [
    # counts all that are as good as the k-th
    Edit(
        "logits.topk(k, dim=-1).indices.flatten().bincount(minlength=experts)",
        "(logits >= logits.topk(k, dim=-1).values[:, -1:]).sum(0)",
        told="exactly k",
    ),
    Edit("p * (price - paid)\n", "(p * (price - paid)).float()\n", told="dtype of the logits"),
    Edit("p * (price - paid)", "price.expand_as(p).clone()", told="behind a softmax"),
    Edit("p * (price - paid)", "p * price", told="two terms"),
    Edit("tokens**2", "tokens", told="divide by T^2"),
    Edit("coeff * experts / (", "coeff / (", told="whatever E is"),
    Edit("(k * tokens**2)", "tokens**2", told="counts for k experts"),
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
        told="divided by the tokens once more",
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


# %% right: the softmax's Jacobian, written out
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    f = torch.bincount(logits.argsort(-1)[:, -k:].flatten(), minlength=E).to(logits) / (k * T)
    g = coeff * E * f / T
    J = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return (p @ g).sum().item(), torch.einsum('tij,j->ti', J, g)


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


# %% right: token by token, a tuple turned round
import torch


def balance(logits, k, coeff):
    T, E = logits.shape
    hot = torch.nn.functional.one_hot(logits.topk(k, sorted=False).indices, E).sum((0, 1)).to(logits)
    price = coeff * E * hot / k / T / T
    loss, rows = 0.0, []
    for p in logits.softmax(1).unbind():
        loss = loss + torch.dot(p, price)
        rows.append(p * price - p * torch.dot(p, price))
    return [loss, torch.stack(rows)]


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
# told: a step down
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    c = coeff * E / (k * T * T) * n
    return (p * c).sum(), -p * (c - (p @ c)[:, None])


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


# %% wrong: first choices
# told: counts the first choice
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.argmax(-1), minlength=E).to(p.dtype)
    c = coeff * E / (k * T * T) * n
    return (p * c).sum(), p * (c - (p @ c)[:, None])


# %% wrong: gradient of the counts
# told: without a gradient
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
# told: a loss of counts alone
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    share = n / (k * T)
    c = coeff * E / (k * T * T) * n
    return coeff * E * (share**2).sum(), p * (c - (p @ c)[:, None])


# %% wrong: paid by the chosen
# told: only for the experts that it chose
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    m = torch.zeros_like(p).scatter(1, logits.topk(k).indices, 1.0)
    c = coeff * E / (k * T * T) * m.sum(0)
    g = m * c
    return (p * g).sum(), p * (g - (p * g).sum(-1, keepdim=True))


# %% wrong: price over the plain mean
# told: plain mean of all prices
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    c = coeff * E / (k * T * T) * n
    return (p * c).sum(), p * (c - c.mean())


# %% wrong: softmax over the chosen
# told: over *all* of them
import torch


def balance(logits, k, coeff):
    tokens, experts = logits.shape
    best = logits.topk(k, dim=-1)
    p = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
    counts = best.indices.flatten().bincount(minlength=experts)
    price = coeff * experts / (k * tokens**2) * counts
    paid = (p * price).sum(-1, keepdim=True)
    return paid.sum(), p * (price - paid)
