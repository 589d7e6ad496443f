# told: a message of its own
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (ep - 1) / ep
    return {"alltoall": leaving * (2 * row + 4), "allgather": tokens * (row + 5 * experts) + (ep - 1) * tokens * row}
