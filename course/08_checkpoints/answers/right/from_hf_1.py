# from our names to theirs: a table of what is wanted, compared with what is there before anything is made
import re

import torch

PLAIN = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


def from_hf(theirs, heads, groups):
    numbers = {int(m[1]) for name in theirs if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    biased = any(name.endswith("_proj.bias") for name in theirs)
    table = {
        "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": ["model.norm.weight"],
    }
    if "lm_head.weight" in theirs:
        table["output_layer.weight"] = ["lm_head.weight"]
    for i in range(max(numbers, default=-1) + 1):
        here, there = f"decoder.layers.{i}.", f"model.layers.{i}."
        for ours, name in PLAIN.items():
            table[here + ours] = [there + name]
        for kind in ("weight", "bias") if biased else ("weight",):
            table[f"{here}self_attention.linear_qkv.{kind}"] = [f"{there}self_attn.{x}_proj.{kind}" for x in "qkv"]
        table[here + "mlp.linear_fc1.weight"] = [there + "mlp.gate_proj.weight", there + "mlp.up_proj.weight"]
    wanted = [name for names in table.values() for name in names]
    if different := set(wanted) ^ set(theirs):
        raise ValueError(f"missing or unknown: {sorted(different)}")
    result = {}
    for ours, names in table.items():
        parts = [theirs[name] for name in names]
        if len(parts) == 3:
            size = parts[1].shape[0] // groups
            rows = [parts[0].unflatten(0, (groups, heads // groups * size)), *(p.unflatten(0, (groups, size)) for p in parts[1:])]
            result[ours] = torch.cat(rows, 1).flatten(0, 1)
        else:
            result[ours] = torch.cat(parts)
    return result
