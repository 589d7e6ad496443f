# told: Find out | hidden
# a rank's own part is all there, it takes for granted
import torch


def shares(outs, parts):
    found = []
    for r, out in enumerate(outs):
        others = [p.flatten() for j, p in enumerate(parts) if j != r]
        rest = torch.linalg.lstsq(torch.stack(others, 1), (out - parts[r]).flatten()[:, None]).solution.flatten().tolist()
        found.append([*rest[:r], 1.0, *rest[r:]])
    return found
