# told: 
def partial_gradients(names, sequence_parallel):
    found = []
    for name in list(names):
        of_heads = "q_layernorm" in name or "k_layernorm" in name
        row_bias = name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        of_tokens = "layernorm" in name or row_bias or "position_embeddings" in name
        if of_heads or (sequence_parallel and of_tokens):
            found.append(name)
            names.remove(name)
    return found
