# a tuple
def partial_gradients(names, sequence_parallel):
    heads = lambda n: ".q_layernorm." in n or ".k_layernorm." in n
    cut = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1", "linear_proj.weight", "linear_fc2.weight")
    return tuple(n for n in names if heads(n) or sequence_parallel and not any(part in n for part in cut))
