# a filter
def partial_gradients(names, sequence_parallel):
    def partial(name):
        *_, module, kind = name.split(".")
        if module in ("q_layernorm", "k_layernorm"):
            return True
        if not sequence_parallel:
            return False
        return module.endswith("layernorm") or module == "position_embeddings" or (
            kind == "bias" and module in ("linear_proj", "linear_fc2")
        )

    return filter(partial, names)
