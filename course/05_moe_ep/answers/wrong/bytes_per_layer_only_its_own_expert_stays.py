# told: which holds E/P experts
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (experts - 1) / experts
    return {"alltoall": leaving * (2 * row + 4), "allgather": (ep - 1) * tokens * (2 * row + 5 * experts)}
