# told: stand by weight
import torch

def permute(tokens, probs, map):
    src = []
    for e in range(map.shape[1]):
        at = map[:, e].nonzero()[:, 0]
        src.append(at[probs[at, e].argsort(descending=True)])
    source = torch.cat(src)
    expert = torch.repeat_interleave(torch.arange(map.shape[1]), map.sum(0))
    return tokens[source], probs[source, expert], source

def unpermute(rows, source, tokens):
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)
