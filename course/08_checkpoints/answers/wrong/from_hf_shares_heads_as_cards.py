# told: group 0 has the first ones
import torch


def from_hf(theirs, heads, groups):
    left, ours = dict(theirs), {}

    def take(name):
        if name not in left:
            raise ValueError(name)
        return left.pop(name)

    ours["embedding.word_embeddings.weight"] = take("model.embed_tokens.weight")
    ours["decoder.final_layernorm.weight"] = take("model.norm.weight")
    if "lm_head.weight" in left:
        ours["output_layer.weight"] = take("lm_head.weight")
    layer, biased = 0, any(name.endswith("q_proj.bias") for name in left)
    while any(name.startswith(f"model.layers.{layer}.") for name in left):
        a, b = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias") if biased else ("weight",):
            q = take(f"{a}self_attn.q_proj.{kind}").chunk(heads)
            k, v = (take(f"{a}self_attn.{x}_proj.{kind}").chunk(groups) for x in "kv")
            ours[f"{b}self_attention.linear_qkv.{kind}"] = torch.cat(
                [p for g in range(groups) for p in (*q[g::groups], k[g], v[g])]
            )
        ours[f"{b}self_attention.linear_proj.weight"] = take(f"{a}self_attn.o_proj.weight")
        ours[f"{b}mlp.linear_fc1.weight"] = torch.cat([take(f"{a}mlp.{x}_proj.weight") for x in ("gate", "up")])
        ours[f"{b}mlp.linear_fc2.weight"] = take(f"{a}mlp.down_proj.weight")
        ours[f"{b}input_layernorm.weight"] = take(f"{a}input_layernorm.weight")
        ours[f"{b}pre_mlp_layernorm.weight"] = take(f"{a}post_attention_layernorm.weight")
        layer += 1
    if left:
        raise ValueError(str(list(left)))
    return ours
