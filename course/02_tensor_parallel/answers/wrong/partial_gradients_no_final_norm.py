# told: last layer
def partial_gradients(names, sequence_parallel):
    def partial(name):
        if "q_layernorm" in name or "k_layernorm" in name:
            return True
        row_bias = name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        norm = "layernorm" in name and name.startswith("layers")
        return sequence_parallel and (norm or row_bias or "position_embeddings" in name)

    return [name for name in names if partial(name)]
