# told:
# strictly above the first that is not chosen: with ties too few, and with k = E no such expert
import torch


def route(x, weight, k):
    logits = x.float() @ weight.float().T
    order = logits.sort(-1, descending=True).values
    bar = order[:, k : k + 1] if k < logits.shape[1] else order[:, -1:] - 1
    map = logits > bar
    return logits.masked_fill(~map, -torch.inf).softmax(-1).nan_to_num(), map
