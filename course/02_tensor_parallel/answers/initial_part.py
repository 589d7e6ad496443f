from labkit.answers import Edit, Same

_CUT = "whole.chunk(tp_size, dim)[tp_rank].contiguous()"
_DRAW = "    whole = torch.randn(*shape,"
_LOCAL = "    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]\n"

_OWN_SEED = (
    "Every rank draws with a seed of its own: the shards are no parts of one matrix, and a replicated matrix is another "
    "on each rank."
)

WRONG = [
    Edit(" * std", "", mistake="The numbers are not multiplied by std."),
    Edit("if dim is None", "if not dim",
         mistake="A matrix that is cut along dim 0 is not cut here: 0 and None are different things."),
    Edit(f"whole if dim is None else {_CUT}", "whole",
         mistake="This is the whole matrix on every rank: of one that is cut, a rank holds a part."),
    Edit(_DRAW, _LOCAL + "    whole = torch.randn(*local,", (f"whole if dim is None else {_CUT}", "whole"),
         mistake="Every rank draws the same numbers, as in the careless version: all shards are equal."),
    Edit(_DRAW, _LOCAL + "    whole = torch.randn(*local,", (f"whole if dim is None else {_CUT}", "whole"),
         ("manual_seed(seed)", "manual_seed(seed if dim is None else seed + tp_rank)"),
         mistake="The shards differ now, but they are no parts of the serial matrix: the model changes with tp."),
    Edit("manual_seed(seed)", "manual_seed(seed + tp_rank)", mistake=_OWN_SEED),
    Edit(_DRAW, _LOCAL + "    whole = torch.randn(*local,", (f"whole if dim is None else {_CUT}", "whole"),
         ("manual_seed(seed)", "manual_seed(seed + tp_rank)"), mistake=_OWN_SEED),
    Edit("    return", _LOCAL + "    return", (_CUT, "whole.flatten().chunk(tp_size)[tp_rank].view(local)"),
         mistake="Each rank continues where the one before it stopped: that is right along dim 0 only."),
    Edit("chunk(tp_size, dim)", "chunk(tp_size, 0)", mistake="The matrix is cut along dim 0, whatever dim says."),
    Edit("chunk(tp_size, dim)", "chunk(tp_size, 1 - dim)",
         mistake="The matrix is cut along the other dim: dim 0 are the rows."),
    Edit("whole if dim is None else whole.chunk(tp_size, dim)", "whole.chunk(tp_size, dim or 0)",
         mistake="A replicated matrix is cut: with dim None every rank holds all of it."),
    Edit("manual_seed(seed)", "manual_seed(seed + tp_rank * (dim is None))",
         mistake="A replicated matrix is another on each rank: its copies must be equal."),
    Edit(_CUT, "(whole[tp_rank::tp_size] if dim == 0 else whole[:, tp_rank::tp_size])",
         mistake="Rows or columns are dealt out to the ranks one by one: a rank holds a block of consecutive ones."),
    Edit("if dim is None", "if dim is None or tp_rank == 0"),
    Edit("    return", "    shape[:] = [1, 1]\n    return", told="it changes its input `shape`"),
]

EQUIVALENT = [
    Same("line 8: `.contiguous()` dropped", "a view has the same numbers"),
]


# %% right: narrow cuts the shard
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g).mul(std)
    if dim is None:
        return w
    n = shape[dim] // tp_size
    return w.narrow(dim, tp_rank * n, n)


# %% right: torch's global seed, and tensor_split
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    torch.manual_seed(seed)
    w = std * torch.randn(shape)
    return w if dim is None else w.tensor_split(tp_size, dim)[tp_rank].clone()


# %% right: indices of the rows or columns
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    generator = torch.Generator()
    generator.manual_seed(seed)
    matrix = std * torch.randn(tuple(shape), generator=generator)
    if dim is None:
        return matrix
    each = shape[dim] // tp_size
    return matrix.index_select(dim, torch.arange(tp_rank * each, tp_rank * each + each))
