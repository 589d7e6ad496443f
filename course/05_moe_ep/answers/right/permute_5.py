# rows as products with a matrix of zeros and ones, [n, T]; the way back is its transpose
import torch


def permute(tokens, probs, map):
    pairs = [(e, t) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]]
    source = torch.tensor([t for _, t in pairs], dtype=torch.int64)
    expert = torch.tensor([e for e, _ in pairs], dtype=torch.int64)
    one = torch.eye(len(tokens), dtype=tokens.dtype)[source]
    return one @ tokens, probs[source, expert], source


def unpermute(rows, source, tokens):
    return torch.eye(tokens, dtype=rows.dtype)[source].T @ rows
