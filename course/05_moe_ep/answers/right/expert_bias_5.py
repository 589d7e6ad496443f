import torch

def choose(scores, bias, k):
    probs = torch.zeros_like(scores)
    where = torch.zeros(scores.shape, dtype=torch.bool)
    for t in range(len(scores)):
        at = torch.sort(scores[t].detach() + bias, descending=True).indices[:k]
        mine = scores[t][at]
        probs[t, at] = mine / mine.sum()
        where[t, at] = True
    return probs, where

def move_bias(bias, counts, rate):
    new = bias.clone()
    mean = counts.double().mean()
    new[counts < mean] += rate
    new[counts > mean] -= rate
    return new
