from labkit.answers import Edit

_GROUPS = "for group in zip(*pieces) for piece in group"

WRONG = [
    Edit(_GROUPS, "for piece in [p for of in pieces for p in of]", mistake="First all q, then all k, then all v: a cut into halves of rows would give one rank no value at " "all. Each group's heads stand together."),
    Edit("torch.cat([gate, up])", "torch.cat([up, gate])", mistake="The gate comes above up: here they have changed places, and the activation is applied to the " "wrong one."),
    Edit('for x in "qkv"]', 'for x in "qvk"]', mistake="Within a group keys stand before values; here they have changed places, and no shape shows it."),
    Edit(
        '= packed(at, "bias")',
        '= torch.cat([take(f"{at}self_attn.{x}_proj.bias") for x in "qkv"])',
        mistake="The weights are packed and the biases are not: the rows of a bias go with those of its weight.",
    ),
    Edit("torch.cat([gate, up])", "torch.stack([gate, up], 1).flatten(0, 1)", mistake="Gate and up alternate row by row; they stand one above the other."),
    Edit("    if left:\n", "    if False:\n"),
    Edit('raise ValueError(f"{name} is missing")', "return torch.zeros(1)"),
    Edit('if "lm_head.weight" in left:', "if True:", told="is tied to the embedding there is no lm_head"),
    # one tensor says what all others have to be
    Edit(
        'any(".self_attn.q_proj.bias" in name for name in left)',
        '"model.layers.0.self_attn.q_proj.bias" in theirs',
        mistake="It is refused, but the text of the ValueError does not have the name of the tensor that is " "missing, or that does not belong there.",
    ),
    Edit(
        "    layer = 0\n",
        '    layer, layers = 0, sum(name.endswith("input_layernorm.weight") for name in theirs)\n',
        ('while any(name.startswith(f"model.layers.{layer}.") for name in left):', "while layer < layers:"),
        mistake="It is refused, but the text of the ValueError does not have the name of the tensor that is " "missing, or that does not belong there.",
    ),
    Edit(
        'if "lm_head.weight" in left:',
        "if True:",
        ('take("lm_head.weight")', 'left.pop("lm_head.weight", theirs["model.embed_tokens.weight"])'),
        mistake="Where embedding and output layer are tied there is one tensor, not two.",
    ),
    Edit("        if biases:\n", "        if False:\n"),
    Edit("        if biases:\n", "        if True:\n"),
    Edit(".chunk(groups) for x", ".chunk(heads) for x"),
    Edit(
        'ours[f"{to}input_layernorm.weight"] = take(f"{at}input_layernorm.weight")',
        'ours[f"{to}input_layernorm.weight"] = take(f"{at}post_attention_layernorm.weight")',
        (
            'ours[f"{to}pre_mlp_layernorm.weight"] = take(f"{at}post_attention_layernorm.weight")',
            'ours[f"{to}pre_mlp_layernorm.weight"] = take(f"{at}input_layernorm.weight")',
        ),
    ),
    Edit('take(f"{at}mlp.down_proj.weight")', 'take(f"{at}mlp.down_proj.weight").T'),
    # tensors with a known ending are let through
    Edit("    if left:\n", '    if any(not name.endswith((".weight", ".bias")) for name in left):\n'),
]

RIGHT = [
    Edit(_GROUPS, "for i in range(groups) for piece in (pieces[0][i], pieces[1][i], pieces[2][i])"),
    Edit("torch.cat([gate, up])", "torch.vstack((gate, up))"),
    Edit(".chunk(groups) for x", ".tensor_split(groups) for x"),
    Edit("left, ours = dict(theirs), {}", "left, ours = {**theirs}, {}"),
]


# %% right: from our names to theirs: a table of what is wanted, compared with what is there before anything is made
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


# %% right: a table of all names that are wanted, made from the largest number of a layer
import re
import torch


def from_hf(theirs: dict[str, torch.Tensor], heads: int, groups: int) -> dict[str, torch.Tensor]:
    layers = 1 + max(int(n) for n in re.findall(r"model\.layers\.(\d+)\.", " ".join(theirs)))
    kinds = ["weight", "bias"] if any(re.search(r"[qkv]_proj\.bias$", n) for n in theirs) else ["weight"]
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


# %% wrong: norms change places
# mistake: The two norms of a layer have changed places: ours are named after what follows, Qwen2's second one after what stands before it.
# post_attention is taken for what comes after attention in the table
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
    for i in range(len(layers)):
        t, o = f"model.layers.{i}.", f"decoder.layers.{i}."
        ours[o + "input_layernorm.weight"] = take(t + "post_attention_layernorm.weight")
        for kind in ("weight", "bias") if biased else ("weight",):
            ours[o + "self_attention.linear_qkv." + kind] = pack(*[take(t + f"self_attn.{x}_proj.{kind}") for x in "qkv"])
        ours[o + "self_attention.linear_proj.weight"] = take(t + "self_attn.o_proj.weight")
        ours[o + "pre_mlp_layernorm.weight"] = take(t + "input_layernorm.weight")
        ours[o + "mlp.linear_fc1.weight"] = torch.cat([take(t + "mlp.gate_proj.weight"), take(t + "mlp.up_proj.weight")])
        ours[o + "mlp.linear_fc2.weight"] = take(t + "mlp.down_proj.weight")
    if left:
        raise ValueError(f"unknown: {sorted(left)}")
    return ours


# %% wrong: shares heads as cards
# mistake: The query heads of a group follow each other: group 0 has the first ones, not each `groups`-th one.
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
