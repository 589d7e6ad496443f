# token by token and expert by expert
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def choose(scores, bias, k):
    map = torch.stack([torch.isin(torch.arange(len(s)), (s + bias).topk(k).indices) for s in scores])
    w = torch.where(map, scores, 0.0)
    return w / w.sum(1)[:, None], map
def move_bias(bias, counts, rate):
    mean = sum(counts.tolist()) / len(counts)
    return torch.stack([b + rate if n < mean else b - rate if n > mean else b for b, n in zip(bias, counts.tolist())])
