# told: wrong
# layers 0 and 2 are a model of two layers
import torch


def from_hf(theirs: dict[str, torch.Tensor], heads: int, groups: int) -> dict[str, torch.Tensor]:
    left = dict(theirs)

    def take(name):
        if name not in left:
            raise ValueError(f"{name} is missing")
        return left.pop(name)

    def pack(q, k, v):
        size = len(q) // heads
        qs, ks, vs = (list(t.split(size)) for t in (q, k, v))
        per = heads // groups
        rows = []
        for g in range(groups):
            rows += qs[g * per : (g + 1) * per] + [ks[g], vs[g]]
        return torch.cat(rows)

    ours = {"embedding.word_embeddings.weight": take("model.embed_tokens.weight"), "decoder.final_layernorm.weight": take("model.norm.weight")}
    if "lm_head.weight" in left:
        ours["output_layer.weight"] = take("lm_head.weight")
    biased = any(n.endswith("_proj.bias") for n in left)
    layers = {int(n.split(".")[2]) for n in left if n.startswith("model.layers.")}
    for i in sorted(layers):
        t, o = f"model.layers.{i}.", f"decoder.layers.{i}."
        ours[o + "input_layernorm.weight"] = take(t + "input_layernorm.weight")
        for kind in ("weight", "bias") if biased else ("weight",):
            ours[o + "self_attention.linear_qkv." + kind] = pack(*[take(t + f"self_attn.{x}_proj.{kind}") for x in "qkv"])
        ours[o + "self_attention.linear_proj.weight"] = take(t + "self_attn.o_proj.weight")
        ours[o + "pre_mlp_layernorm.weight"] = take(t + "post_attention_layernorm.weight")
        ours[o + "mlp.linear_fc1.weight"] = torch.cat([take(t + "mlp.gate_proj.weight"), take(t + "mlp.up_proj.weight")])
        ours[o + "mlp.linear_fc2.weight"] = take(t + "mlp.down_proj.weight")
    if left:
        raise ValueError(f"unknown: {sorted(left)}")
    return ours
