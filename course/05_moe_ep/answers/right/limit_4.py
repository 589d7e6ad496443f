# places by a double argsort
import torch


def limit(probs, map, capacity):
    heavy = torch.where(map, probs, torch.full_like(probs, -1.0))
    place = heavy.argsort(dim=0, descending=True).argsort(dim=0)
    kept = torch.logical_and(map, place < capacity)
    return torch.where(kept, probs, torch.zeros_like(probs)), kept
