# told: queries and keys are missing
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if sequence_parallel
        and (
            ("layernorm" in n and "q_" not in n and "k_" not in n)
            or "proj.bias" in n
            or "fc2.bias" in n
            or "position" in n
        )
    ]
