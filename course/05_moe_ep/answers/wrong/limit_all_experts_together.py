# told: all experts share the room
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf).flatten()
    at = key.topk(min(capacity * map.shape[1], key.numel())).indices
    keep = torch.zeros_like(map).flatten().scatter(0, at, True).view_as(map) & map
    return probs * keep, keep
