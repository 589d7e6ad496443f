# told:
# what a rank gets is counted beside what it sends
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    row = h * element_size
    return {
        "alltoall": 2 * (ep - 1) / ep * k * tokens * (2 * row + 4),
        "allgather": 2 * (ep - 1) * tokens * (2 * row + 5 * experts),
    }
