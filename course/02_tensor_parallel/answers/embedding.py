from labkit.answers import Edit, Same

_OWN = "Ids of other ranks must give zeros here; yours give some row of this rank's, which enters the sum."
_ZEROS = ".masked_fill(foreign.unsqueeze(-1), 0.0)"

WRONG = [
    Edit("reduce_from_region(rows, tp)", "rows",
         mistake="These are this rank's rows only: the tokens of other ranks are still zeros."),
    Edit(_ZEROS, "", mistake=_OWN),
    Edit(_ZEROS, "", ("local.masked_fill(foreign, 0)", "local.clamp(0, weight.shape[0] - 1)"), mistake=_OWN),
    Edit("_region(rows, tp)", "_region(rows, tp) / tp.size",
         mistake="This is the mean over ranks: one rank has the row, the others add zeros, and nothing is divided."),
    Edit("_region(rows, tp)", "_region(copy_to_region(rows, tp), tp)",
         mistake="The gradient is summed once too often: it is the same on every rank already."),
    Edit("0), weight)", "0), copy_to_region(weight, tp))",
         mistake="The gradient of the table is summed over ranks: each rank has other rows, and their gradient is "
                 "complete."),
    Edit("ids - tp.rank * weight.shape[0]", "torch.where(ids % tp.size == tp.rank, ids // tp.size, -1)",
         mistake="Rank r owns a block of consecutive ids; yours are dealt out to the ranks one by one."),
    Edit("import torch\n", "import torch\nimport torch.distributed as dist\n",
         ("return reduce_from_region(rows, tp)",
         "dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=tp.group)\n    return rows"),
         mistake="You took the largest over ranks: beside a negative number of the row this is another rank's zero."),
    Edit("local.masked_fill(foreign, 0)", "ids", told="its table begins with the row of id r n"),
    Edit("0), weight)", "0), weight.detach())", told="do not lead back to the table"),
    Edit("local < 0", "local <= 0", mistake="The first id of each rank finds zeros: it is the first row of that rank."),
    Edit("local >= weight.shape[0]", "local >= weight.shape[0] - 1",
         mistake="The last id of each rank finds zeros: it is the last row of that rank."),
    Edit("local >= weight.shape[0]", "local > weight.shape[0]",
         ("local.masked_fill(foreign, 0)", "local.clamp(0, weight.shape[0] - 1)"),
         mistake="The first id of the next rank finds a row here, too: this rank's ids end before it."),
    Edit("tp.rank *", "torch.distributed.get_rank() *"),
    Edit("reduce_from_region\n", "reduce_from_region, gather_from_sequence_region\n",
         ("reduce_from_region(rows, tp)",
         "F.embedding(ids, gather_from_sequence_region(weight, tp, reduce_gradient=False))"),
         told="allowed here: all_reduce"),
]

EQUIVALENT = [
    Same("line 11: 1 for 0", "the row that is looked up there is masked afterwards"),
]


# %% right: rows by remainder, multiplied by zero where they are foreign
from minimegatron.comm.collectives import reduce_from_region
def embedding(ids, weight, tp):
    n = len(weight)
    own = (ids // n) == tp.rank
    rows = weight[ids % n] * own.unsqueeze(-1)
    return reduce_from_region(rows, tp)


# %% right: masked_scatter into zeros
from minimegatron.comm.collectives import reduce_from_region
def embedding(ids, weight, tp):
    n = len(weight)
    local = ids - tp.rank * n
    out = weight.new_zeros(*ids.shape, weight.shape[1])
    own = (local >= 0) & (local < n)
    out = out.masked_scatter(own.unsqueeze(-1), weight[local[own]])
    return reduce_from_region(out, tp)


# %% right: a one-hot product
import torch
from minimegatron.comm.collectives import reduce_from_region
def embedding(ids, weight, tp):
    n = weight.shape[0]
    mine = torch.arange(tp.rank * n, (tp.rank + 1) * n)
    return reduce_from_region((ids[..., None] == mine).to(weight.dtype) @ weight, tp)


# %% wrong: a repeated id counts once
# mistake: y is right, the gradient of the table is not: follow it back through what you did with the rows.
import torch
import torch.distributed as dist
class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, tp):
        local = ids - tp.rank * weight.shape[0]
        own = (local >= 0) & (local < weight.shape[0])
        ctx.save_for_backward(local[own], own)
        ctx.shape = weight.shape
        rows = weight.new_zeros(*ids.shape, weight.shape[1])
        rows[own] = weight[local[own]]
        dist.all_reduce(rows, group=tp.group)
        return rows
    @staticmethod
    def backward(ctx, dy):
        local, own = ctx.saved_tensors
        dw = dy.new_zeros(ctx.shape)
        dw[local] = dy[own]
        return None, dw, None
def embedding(ids, weight, tp):
    return Lookup.apply(ids, weight, tp)
