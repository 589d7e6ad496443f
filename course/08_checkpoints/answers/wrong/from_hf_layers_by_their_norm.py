# told: does not have the name of the tensor that is missing
# how many layers there are, and whether there are biases, is read from one name
import torch


def from_hf(theirs: dict[str, torch.Tensor], heads: int, groups: int) -> dict[str, torch.Tensor]:
    layers = 0
    while f"model.layers.{layers}.input_layernorm.weight" in theirs:
        layers += 1
    kinds = ["weight", "bias"] if "model.layers.0.self_attn.q_proj.bias" in theirs else ["weight"]
    table = {"embedding.word_embeddings.weight": ["model.embed_tokens.weight"], "decoder.final_layernorm.weight": ["model.norm.weight"]}
    if "lm_head.weight" in theirs:
        table["output_layer.weight"] = ["lm_head.weight"]
    for i in range(layers):
        here, there = f"decoder.layers.{i}.", f"model.layers.{i}."
        for ours, names in {"input_layernorm.weight": ["input_layernorm.weight"], "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"], "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"], "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.linear_fc2.weight": ["mlp.down_proj.weight"], **{f"self_attention.linear_qkv.{k}": [f"self_attn.{x}_proj.{k}" for x in "qkv"] for k in kinds}}.items():
            table[here + ours] = [there + n for n in names]
    wanted = {n for names in table.values() for n in names}
    for name in sorted(wanted ^ set(theirs)):
        raise ValueError(name)
    out = {}
    for ours, names in table.items():
        parts = [theirs[n] for n in names]
        if len(parts) == 3:
            parts = [p for g in zip(*(t.chunk(groups) for t in parts)) for p in g]
        out[ours] = torch.cat(parts).clone()
    return out
