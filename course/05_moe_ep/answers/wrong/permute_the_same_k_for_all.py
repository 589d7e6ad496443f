# told: takes as many rows for granted
import torch

def permute(tokens, probs, map):
    expert, source = map.T.nonzero(as_tuple=True)
    return tokens[source], probs[source, expert], source

def unpermute(rows, source, tokens):
    order = source.argsort(stable=True)
    return rows[order].view(tokens, -1, rows.shape[1]).sum(1)
