import torch

def permute(tokens, probs, map):
    where = [(e, t) for e in range(map.shape[1]) for t in range(map.shape[0]) if map[t, e]]
    source = torch.tensor([t for _, t in where], dtype=torch.int64)
    expert = torch.tensor([e for e, _ in where], dtype=torch.int64)
    return tokens[source], probs[source, expert], source

def unpermute(rows, source, tokens):
    return torch.stack([rows[source == t].sum(0) for t in range(tokens)]) if tokens else rows.new_zeros(0, rows.shape[1])
