# names taken apart
def partial_gradients(names, sequence_parallel):
    out = []
    for name in names:
        *_, module, kind = name.split(".")
        if module in ("q_layernorm", "k_layernorm"):
            out.append(name)
        elif sequence_parallel and (
            module.endswith("norm")
            or module == "position_embeddings"
            or (module, kind) in (("linear_proj", "bias"), ("linear_fc2", "bias"))
        ):
            out.append(name)
    return out
