# told: cut off from what it was made of
import torch

def permute(tokens, probs, map):
    expert, source = map.T.nonzero(as_tuple=True)
    return tokens[source], probs[source, expert], source

def unpermute(rows, source, tokens):
    out = rows.new_zeros(tokens, rows.shape[1])
    for i, t in enumerate(source.tolist()):
        out[t] += rows[i].detach()
    return out
