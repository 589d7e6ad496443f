# told:
import torch


def draw(weights, number):
    mass = weights.cumsum(0)
    return int((mass <= number * mass[-1]).sum())


def verify(p, q, proposed, u, v):
    tokens = []
    for i, token in enumerate(proposed):
        tokens.append(draw(p[i], v[i]))
        if tokens[-1] != token:
            return tokens
    return [*tokens, draw(p[len(proposed)], v[len(proposed)])]
