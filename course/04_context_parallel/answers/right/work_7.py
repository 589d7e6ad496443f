import torch


def work(s, cp, zigzag):
    seen = torch.arange(1, s + 1)
    if zigzag:
        c = seen.view(2 * cp, -1)
        return (c[:cp] + c.flip(0)[:cp]).sum(1)
    return seen.view(cp, -1).sum(1)
