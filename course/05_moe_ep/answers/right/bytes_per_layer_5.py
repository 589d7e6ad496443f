def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    a2a = ag = 0.0
    for other in range(1, ep):
        rows = k * tokens / ep
        a2a += rows * (h * element_size + 4)  # there
        a2a += rows * h * element_size  # results that I send back
        ag += tokens * h * element_size + tokens * experts * 4 + tokens * experts
        ag += tokens * h * element_size
    return {"alltoall": a2a, "allgather": ag}
