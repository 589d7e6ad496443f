# told: multiplied by their weights already
import torch

def permute(tokens, probs, map):
    expert, source = map.T.nonzero(as_tuple=True)
    w = probs[source, expert]
    return tokens[source] * w[:, None], w, source

def unpermute(rows, source, tokens):
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)
