# told: not orthogonal | hidden
import torch
import torch.distributed as dist
def shares(outs, parts):
    return [[float((o * p).sum() / (p * p).sum()) for p in parts] for o in outs]
