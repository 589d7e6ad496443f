# summed over the other ranks
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    a = sum(k * tokens / ep * (2 * h * element_size + 4) for r in range(1, ep))
    g = sum(tokens * (2 * h * element_size + 4 * experts + experts) for r in range(1, ep))
    return {'alltoall': a, 'allgather': g}
