# told: same scalar type | dtype
# the zeros that rows are added to have the default dtype, not the rows'
import torch


def permute(tokens, probs, map):
    expert, source = map.T.nonzero(as_tuple=True)
    return tokens[source], probs[source, expert], source


def unpermute(rows, source, tokens):
    return torch.zeros(tokens, rows.shape[1]).index_add(0, source, rows)
