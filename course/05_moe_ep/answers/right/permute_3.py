# a stable sort of all pairs
import torch


def permute(tokens, probs, map):
    source, expert = map.nonzero(as_tuple=True)
    order = expert.argsort(stable=True)
    source, expert = source[order], expert[order]
    return torch.index_select(tokens, 0, source), probs[(source, expert)], source


def unpermute(rows, source, tokens):
    out = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype)
    return out.index_put((source,), rows, accumulate=True)
