from labkit.answers import Edit

_GROUPS = "for group in zip(*pieces) for piece in group"
_PIECES = 'pieces = [take(f"{at}self_attn.{x}_proj.{kind}").chunk(groups) for x in "qkv"]\n'
_QKV = 'q, k, v = (take(f"{at}self_attn.{x}_proj.{kind}") for x in "qkv")\n        pieces = '
_FC1 = "torch.cat([gate, up])"
_FIRST, _SECOND = "{at}input_layernorm.weight", "{at}post_attention_layernorm.weight"
_NAME = "It is refused, but the text of the ValueError does not have the name of the tensor that is missing, or that does not belong there."

WRONG = [
    Edit(
        _GROUPS, "for piece in [p for of in pieces for p in of]",
        mistake="First all q, then all k, then all v: a cut into halves of rows would give one rank no value at all. Each group's heads stand together.",
    ),
    Edit(
        _PIECES, f"{_QKV}[q.chunk(heads), *([x for x in y.chunk(groups) for _ in range(heads // groups)] for y in (k, v))]\n",
        mistake="Keys and values are repeated for every query head; a group has one each.",
    ),
    Edit(
        _PIECES, f"{_QKV}[[torch.cat(q.chunk(heads)[g::groups]) for g in range(groups)], k.chunk(groups), v.chunk(groups)]\n",
        mistake="The query heads of a group follow each other: group 0 has the first ones, not each `groups`-th one.",
    ),
    Edit('for x in "qkv"]', 'for x in "qvk"]', mistake="Within a group keys stand before values; here they have changed places, and no shape shows it."),
    Edit(
        '= packed(at, "bias")', '= torch.cat([take(f"{at}self_attn.{x}_proj.bias") for x in "qkv"])',
        mistake="The weights are packed and the biases are not: the rows of a bias go with those of its weight.",
    ),
    Edit(_FC1, "torch.cat([up, gate])", mistake="The gate comes above up: here they have changed places, and the activation is applied to the wrong one."),
    Edit(_FC1, "torch.stack([gate, up], 1).flatten(0, 1)", mistake="Gate and up alternate row by row; they stand one above the other."),
    Edit(
        _FIRST, "{at}first", (_SECOND, _FIRST), ("{at}first", _SECOND),
        mistake="The two norms of a layer have changed places: ours are named after what follows, Qwen2's second one after what stands before it.",
    ),
    Edit(
        'if "lm_head.weight" in left:', "if True:", ('take("lm_head.weight")', 'left.pop("lm_head.weight", theirs["model.embed_tokens.weight"])'),
        mistake="Where embedding and output layer are tied there is one tensor, not two.",
    ),
    # one tensor says what all others have to be
    Edit('any(".self_attn.q_proj.bias" in name for name in left)', '"model.layers.0.self_attn.q_proj.bias" in theirs', mistake=_NAME),
    Edit(
        "    layer = 0\n", '    layer, layers = 0, sum(name.endswith("input_layernorm.weight") for name in theirs)\n',
        ('while any(name.startswith(f"model.layers.{layer}.") for name in left):', "while layer < layers:"),
        mistake=_NAME,
    ),
    Edit('if "lm_head.weight" in left:', "if True:", mistake="Where the output layer is tied to the embedding there is no lm_head.weight."),
    Edit("    if left:\n", "    if False:\n"),
    Edit('raise ValueError(f"{name} is missing")', "return torch.zeros(1)"),
    Edit("        if biases:\n", "        if False:\n"),
    Edit("        if biases:\n", "        if True:\n"),
    Edit(".chunk(groups) for x", ".chunk(heads) for x"),
    Edit('take(f"{at}mlp.down_proj.weight")', 'take(f"{at}mlp.down_proj.weight").T'),
    Edit('take(f"{at}mlp.down_proj.weight")', 'take(f"{at}mlp.down_proj.weight").float()'),
    # tensors with a known ending are let through
    Edit("    if left:\n", '    if any(not name.endswith((".weight", ".bias")) for name in left):\n'),
]

RIGHT = [
    Edit(_GROUPS, "for i in range(groups) for piece in (pieces[0][i], pieces[1][i], pieces[2][i])"),
    Edit(".chunk(groups) for x", ".tensor_split(groups) for x", (_FC1, "torch.vstack((gate, up))")),
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
