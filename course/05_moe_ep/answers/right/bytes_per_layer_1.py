# there and back apart
def bytes_per_layer(tokens, h, experts, k, ep, element_size):
    rows, others = k * tokens / ep, ep - 1
    there, back = rows * (h * element_size + 4), rows * h * element_size
    return dict(alltoall=others * (there + back), allgather=others * (tokens * (h * element_size + experts * 5) + tokens * h * element_size))
