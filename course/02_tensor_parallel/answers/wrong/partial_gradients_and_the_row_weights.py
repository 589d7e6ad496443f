# told: row layer's weight
def partial_gradients(names, sequence_parallel):
    def partial(name):
        if ".q_layernorm." in name or ".k_layernorm." in name:
            return True
        row = "linear_proj" in name or "linear_fc2" in name
        return sequence_parallel and ("layernorm" in name or row or "position_embeddings" in name)

    return [name for name in names if partial(name)]
