# told: matrix of words
def partial_gradients(names, sequence_parallel):
    def partial(name):
        if "q_layernorm" in name or "k_layernorm" in name:
            return True
        row_bias = name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        return sequence_parallel and ("layernorm" in name or row_bias or "embeddings" in name)

    return [name for name in names if partial(name)]
