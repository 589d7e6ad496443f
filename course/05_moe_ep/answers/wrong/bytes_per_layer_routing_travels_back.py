# told: What comes back is
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (ep - 1) / ep
    return {"alltoall": leaving * (2 * row + 4), "allgather": 2 * (ep - 1) * tokens * (row + 5 * experts)}
