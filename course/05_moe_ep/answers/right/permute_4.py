# expert by expert, with einsum on the way back
import torch


def permute(tokens, probs, map):
    rows, weights, source = [], [], []
    for e in range(map.shape[1]):
        mine = torch.where(map[:, e])[0]
        rows.append(tokens[mine])
        weights.append(probs[mine, e])
        source.append(mine)
    return torch.cat(rows), torch.cat(weights), torch.cat(source)


def unpermute(rows, source, tokens):
    hot = (torch.arange(tokens)[:, None] == source[None]).to(rows.dtype)
    return torch.einsum("tn,nh->th", hot, rows)
