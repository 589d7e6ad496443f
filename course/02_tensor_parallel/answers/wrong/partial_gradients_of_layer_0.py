# told: Only names of layer 0
def partial_gradients(names, sequence_parallel):
    always = ["layers.0.self_attention.q_layernorm.weight", "layers.0.self_attention.k_layernorm.weight"]
    tokens = [
        "embedding.position_embeddings.weight", "layers.0.input_layernorm.weight", "layers.0.input_layernorm.bias",
        "layers.0.self_attention.linear_proj.bias", "layers.0.pre_mlp_layernorm.weight",
        "layers.0.pre_mlp_layernorm.bias", "layers.0.mlp.linear_fc2.bias", "final_layernorm.weight",
        "final_layernorm.bias",
    ]
    return [n for n in names if n in always or (sequence_parallel and n in tokens)]
