from labkit.answers import Edit

WRONG = [
    Edit(' or row_bias or "position_embeddings" in name', "", mistake="Norms are not all: something else is replicated, too, and is added to this rank's tokens only."),
    Edit("            return True\n", "            return sequence_parallel\n", mistake="The norms of queries and keys see only this rank's heads: partial also without sequence " "parallelism."),
    Edit(' or "position_embeddings" in name', "", mistake="The positions are missing: they are added to this rank's tokens only."),
    Edit(
        'name.endswith(("linear_proj.bias", "linear_fc2.bias"))',
        'name.endswith("bias")',
        mistake="A column layer's bias is cut over tp as its rows are: each rank's part is complete.",
    ),
    Edit("return sequence_parallel and (", "return (", mistake="A matrix of words is cut by its rows, and each rank sees all tokens there: its gradient is " "complete."),
    # and the words
    Edit("position_embeddings", "embeddings", mistake="A matrix of words is cut by its rows, and each rank sees all tokens there: its gradient is " "complete."),
    # no final norm
    Edit(
        'return sequence_parallel and ("layernorm" in name or row_bias or "position_embeddings" in name)',
        """norm = "layernorm" in name and name.startswith("layers")
        return sequence_parallel and (norm or row_bias or "position_embeddings" in name)""",
        mistake="The norm behind the last layer is missing.",
    ),
    # sorted
    Edit(
        "return [name for name in names if partial(name)]",
        'return sorted({name for name in names if partial(name)}, key=lambda n: ("k_lay" in n, names.index(n)))',
    ),
]


# %% right: two regular expressions
import re
def partial_gradients(names, sequence_parallel):
    always = re.compile(r'\.[qk]_layernorm')
    tokens = re.compile(r'(linear_proj|linear_fc2)\.bias|_layernorm|position')
    return [n for n in names if always.search(n) or sequence_parallel and tokens.search(n)]


# %% right: by what is complete
def partial_gradients(names, sequence_parallel):
    cut = ('word_embeddings.weight', 'output_layer.weight', 'linear_qkv.weight', 'linear_qkv.bias', 'linear_fc1.weight', 'linear_fc1.bias', 'linear_proj.weight', 'linear_fc2.weight')
    replicated = [n for n in names if not n.endswith(cut)]
    return replicated if sequence_parallel else [n for n in replicated if n.split('.')[-2] in ('q_layernorm', 'k_layernorm')]


# %% right: a tuple
def partial_gradients(names, sequence_parallel):
    heads = lambda n: ".q_layernorm." in n or ".k_layernorm." in n
    cut = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1", "linear_proj.weight", "linear_fc2.weight")
    return tuple(n for n in names if heads(n) or sequence_parallel and not any(part in n for part in cut))


# %% right: names taken apart
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


# %% wrong: all names
# mistake: These are all names. What is cut over tp has its whole gradient on the rank that holds it.
def partial_gradients(names, sequence_parallel):
    return list(names) if sequence_parallel else []


# %% wrong: and the row weights
# mistake: A row layer's weight is cut over tp, and each rank multiplies its part with all tokens: it is complete.
def partial_gradients(names, sequence_parallel):
    def partial(name):
        if ".q_layernorm." in name or ".k_layernorm." in name:
            return True
        row = "linear_proj" in name or "linear_fc2" in name
        return sequence_parallel and ("layernorm" in name or row or "position_embeddings" in name)

    return [name for name in names if partial(name)]


# %% wrong: column biases
# mistake: You took the biases of the column layers for those of the row layers: a column layer's bias is cut.
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if "q_layernorm" in n
        or "k_layernorm" in n
        or sequence_parallel
        and ("layernorm" in n or "qkv.bias" in n or "fc1.bias" in n or "position" in n)
    ]


# %% wrong: norm weights only
# mistake: A norm's bias is replicated, too: with sequence parallelism it sees this rank's tokens only.
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if n.endswith("q_layernorm.weight")
        or n.endswith("k_layernorm.weight")
        or sequence_parallel
        and (n.endswith("layernorm.weight") or "proj.bias" in n or "fc2.bias" in n or "position" in n)
    ]


# %% wrong: of layer 0
# mistake: Only names of layer 0 are found: a model has more layers.
def partial_gradients(names, sequence_parallel):
    always = ["layers.0.self_attention.q_layernorm.weight", "layers.0.self_attention.k_layernorm.weight"]
    tokens = [
        "embedding.position_embeddings.weight", "layers.0.input_layernorm.weight", "layers.0.input_layernorm.bias",
        "layers.0.self_attention.linear_proj.bias", "layers.0.pre_mlp_layernorm.weight",
        "layers.0.pre_mlp_layernorm.bias", "layers.0.mlp.linear_fc2.bias", "final_layernorm.weight",
        "final_layernorm.bias",
    ]
    return [n for n in names if n in always or (sequence_parallel and n in tokens)]


# %% wrong: qk never
# mistake: Norms of queries and keys are missing: every rank has the whole weight, and only some of the heads.
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if sequence_parallel
        and (
            ("layernorm" in n and "q_" not in n and "k_" not in n)
            or "proj.bias" in n
            or "fc2.bias" in n
            or "position" in n
        )
    ]


# %% wrong: queries and not keys
# mistake: What holds for the norm of the queries holds for that of the keys: one is missing.
def partial_gradients(names, sequence_parallel):
    return [
        n
        for n in names
        if "q_layernorm" in n
        or sequence_parallel
        and ("layernorm" in n or "proj.bias" in n or "fc2.bias" in n or "position" in n)
    ]


# %% wrong: changes the names
def partial_gradients(names, sequence_parallel):
    found = []
    for name in list(names):
        of_heads = "q_layernorm" in name or "k_layernorm" in name
        row_bias = name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        of_tokens = "layernorm" in name or row_bias or "position_embeddings" in name
        if of_heads or (sequence_parallel and of_tokens):
            found.append(name)
            names.remove(name)
    return found


