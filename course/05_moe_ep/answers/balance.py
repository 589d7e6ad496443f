from labkit.answers import Edit

_GRADIENT = "p * (price - paid)"
_CHOSEN = "torch.zeros_like(p).scatter(1, logits.topk(k, dim=-1).indices, 1.0)"

WRONG = [
    Edit("logits.topk(k, dim=-1).indices.flatten().bincount(minlength=experts)",
         "(logits >= logits.topk(k, dim=-1).values[:, -1:]).sum(0)",
         mistake="Where experts are equally good, a token still counts for exactly k of them. Here it counts for all "
         "that are as good as the k-th."),
    Edit("tokens**2", "tokens", mistake="Both the sum of p and n_e grow with the tokens: divide by T^2."),
    Edit("coeff * experts / (", "coeff / (",
         mistake="The factor is E / (k T^2): at an even load the loss is coeff, whatever E is."),
    Edit("(k * tokens**2)", "tokens**2", mistake="The factor is E / (k T^2): every token counts for k experts."),
    Edit("topk(k, dim=-1)", "topk(1, dim=-1)",
         mistake="n_e counts the first choice of each token only. A token counts for k experts."),
    Edit("    counts =", f"    p = logits.masked_fill({_CHOSEN} == 0, -torch.inf).softmax(-1)\n    counts =",
         mistake="Here p is the softmax over the chosen experts. The balancing loss takes it over *all* of them: "
         "the router must learn of experts that are not chosen, too."),
    Edit("    paid =", f"    price = price * {_CHOSEN}\n    paid =",
         mistake="Here a token pays only for the experts that it chose. "
         "The sum over t holds the p of all tokens, chosen or not."),
    Edit("    paid =", f"    price = coeff * experts / (k * tokens**2) * {_CHOSEN}\n    paid =",
         mistake="Here a token pays for its own choice, whatever others choose. An expert's price is n_e, the number of "
         "*all* tokens that chose it."),
    Edit(_GRADIENT, "price.expand_as(p).clone()",
         mistake="That is the gradient with respect to p. The logits are behind a softmax, which has a gradient of "
         "its own."),
    Edit(_GRADIENT, "p * price", mistake="The gradient of a softmax has two terms; here is the first."),
    Edit(_GRADIENT, "p * (1 - p) * price",
         mistake="A logit changes the p of *all* experts of its token, not only its own."),
    Edit(_GRADIENT, "p * (price - price.mean())",
         mistake="The price is compared with the plain mean of all prices. Compare it "
         "with what the token pays: the mean weighted by its p."),
    Edit(_GRADIENT, "p * (price - paid.mean())",
         mistake="The price is compared with what all tokens pay on average. Each token has an average of its own."),
    Edit(_GRADIENT, "p * (paid - price)", mistake="That is a step down. Asked is the gradient, which points up."),
    Edit("logits.topk(k, dim=-1)", "logits.abs().topk(k, dim=-1)"),
    Edit("bincount(minlength=experts)", "bincount()"),
    Edit("logits.softmax(-1)", "logits.exp() / logits.exp().sum(-1, keepdim=True)"),
    Edit("logits.softmax(-1)", "logits.softmax(0)"),
    Edit(f"{_GRADIENT}\n", f"({_GRADIENT}).float()\n"),
    Edit(_GRADIENT, f"{_GRADIENT} / tokens"),
    Edit("paid.sum()", "paid.mean()"),
    Edit("    p =", "    logits -= logits.amax(-1, keepdim=True)\n    p =", told="changes its input"),
    Edit("    p = logits", "    logits = logits.clone().requires_grad_()\n    logits.sum().backward()\n    p = logits",
         told="no autograd here"),
]


# %% right: in double, with the counts from a scatter
import torch

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
