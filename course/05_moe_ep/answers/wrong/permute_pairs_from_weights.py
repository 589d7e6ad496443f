# told: `map` says where a token goes
import torch


def permute(tokens, probs, map):
    pairs = probs.T.nonzero()
    expert, source = pairs[:, 0], pairs[:, 1]
    return tokens[source], probs[source, expert], source


def unpermute(rows, source, tokens):
    return torch.zeros(tokens, rows.shape[1], dtype=rows.dtype).index_add(0, source, rows)
