# told: for those of the row layers
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if "q_layernorm" in n
        or "k_layernorm" in n
        or sequence_parallel
        and ("layernorm" in n or "qkv.bias" in n or "fc1.bias" in n or "position" in n)
    ]
