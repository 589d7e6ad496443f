# told: matrix of words
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if "q_layernorm" in n
        or "k_layernorm" in n
        or sequence_parallel
        and ("layernorm" in n or "proj.bias" in n or "fc2.bias" in n or "embedding" in n)
    ]
