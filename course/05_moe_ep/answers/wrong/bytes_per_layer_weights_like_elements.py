# told: whatever the size of an element
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    leaving = k * tokens * (ep - 1) / ep
    return {"alltoall": leaving * (2 * row + element_size), "allgather": (ep - 1) * tokens * (2 * row + experts * (element_size + 1))}
