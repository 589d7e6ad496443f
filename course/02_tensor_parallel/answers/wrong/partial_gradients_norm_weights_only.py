# told: norm's bias
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if n.endswith("q_layernorm.weight")
        or n.endswith("k_layernorm.weight")
        or sequence_parallel
        and (n.endswith("layernorm.weight") or "proj.bias" in n or "fc2.bias" in n or "position" in n)
    ]
