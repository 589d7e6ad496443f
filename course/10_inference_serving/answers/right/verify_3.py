# one place, then itself for the rest
import torch


def draw(weights, number):
    return int(torch.searchsorted(weights.cumsum(0), number * weights.sum(), right=True))


def verify(p, q, proposed, u, v):
    if not proposed:
        return [draw(p[0], v[0])]
    x = proposed[0]
    if u[0] * q[0, x] < p[0, x]:
        return [x, *verify(p[1:], q[1:], proposed[1:], u[1:], v[1:])]
    return [draw(torch.maximum(p[0], q[0]) - q[0], v[0])]
