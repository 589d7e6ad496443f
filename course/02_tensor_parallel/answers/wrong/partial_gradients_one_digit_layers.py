# told: 
import re


def partial_gradients(names, sequence_parallel):
    def short(name):
        return re.sub(r"layers\.\d\.", "", name)

    tokens = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "self_attention.linear_proj.bias",
              "mlp.linear_fc2.bias", "embedding.position")
    return [
        n for n in names
        if "q_layernorm" in n or "k_layernorm" in n or (sequence_parallel and short(n).startswith(tokens))
    ]
