# in torch, float32
import torch


def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = torch.tensor(float(h * element_size))
    others = 1 - 1 / ep
    return {"alltoall": k * tokens * others * (2 * row + 4), "allgather": (ep - 1) * tokens * (2 * row + 5 * experts)}
