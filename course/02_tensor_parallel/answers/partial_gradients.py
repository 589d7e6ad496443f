from labkit.answers import Edit

_NAMES = "[name for name in names if partial(name)]"
_OF_HEADS = '"q_layernorm" in name or "k_layernorm" in name'

WRONG = [
    Edit("return True", "return sequence_parallel",
         mistake="The norms of queries and keys see only this rank's heads: partial also without sequence "
                 "parallelism."),
    Edit(_NAMES, "list(names) if sequence_parallel else []",
         mistake="These are all names. What is cut over tp has its whole gradient on the rank that holds it."),
    Edit("if partial", "if not partial",
         mistake="These are all the others: asked are the names whose gradients are only a part."),
    Edit("return sequence_parallel and (", "return (",
         mistake="Without sequence parallelism every rank sees all tokens: norms and row biases are complete then."),
    Edit("return True", "return False",
         mistake="Norms of queries and keys are missing: every rank has the whole weight, and only some of the heads."),
    Edit(' or row_bias or "position_embeddings" in name', "",
         mistake="Norms are not all: something else is replicated, too, and is added to this rank's tokens only."),
    Edit(' or row_bias or "position_embeddings" in name', "", ("return True", "return sequence_parallel"),
         mistake="Norms are not all, and cut tokens are not the only reason: ask of each name which tokens and which "
                 "heads its copy sees."),
    Edit(" or row_bias or", " or",
         mistake="Biases of row layers are missing: they are replicated, and added to this rank's tokens."),
    Edit(' or "position_embeddings" in name', "",
         mistake="The positions are missing: they are added to this rank's tokens only."),
    Edit('name.endswith(("linear_proj.bias", "linear_fc2.bias"))', '"norm" not in name and name.endswith("bias")',
         mistake="A column layer's bias is cut over tp as its rows are: each rank's part is complete."),
    Edit("linear_proj.bias", "linear_qkv.bias", ("linear_fc2.bias", "linear_fc1.bias"),
         mistake="You took the biases of the column layers for those of the row layers: a column layer's bias is cut."),
    Edit('"linear_fc2.bias"', '"linear_fc2.bias", "linear_proj.weight", "linear_fc2.weight"',
         mistake="A row layer's weight is cut over tp, and each rank multiplies its part with all tokens: it is "
                 "complete."),
    Edit(f"return {_NAMES}", f"return sorted({_NAMES})",
         mistake="These are the right names, sorted; they keep the order of the list."),
    Edit("position_embeddings", "embeddings", told="wrong | missing"),
    Edit('("layernorm" in name', '("layernorm" in name and name.startswith("layers")'),
    Edit(' or "k_layernorm" in name', ""),
    Edit('"layernorm" in name', 'name.endswith("layernorm.weight")'),
    Edit(f"    return {_NAMES}", f"    found = {_NAMES}\n    names.clear()\n    return found",
         told="it changes its input `names`"),
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
