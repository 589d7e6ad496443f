# softmax over all in double, then made whole
import torch


def route(x, weight, k):
    p = (x.double() @ weight.double().T).softmax(-1)
    v, i = p.topk(k)
    z = torch.zeros_like(p)
    return z.scatter(1, i, v / v.sum(-1, keepdim=True)).float(), z.scatter(1, i, 1).bool()
