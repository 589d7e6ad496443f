from labkit.answers import Edit, Same

_MAX = "        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)\n"
_ONE = "own.unsqueeze(-1).to(softmax.dtype)"

_EVERY_TARGET = "Every rank adds a logit for every target, also where the target is not its own word."
_EVERY_ONE = (
    "The loss is right, dz is not: every rank subtracts one at a target, also where it is not its own word."
)
_CLAMPED = ("local.masked_fill(~own, 0)", "local.clamp(0, n - 1)")
_OWN = ".masked_fill(~own, 0.0)"
_NO_NUMBER = (
    "The loss is nan where logits of a rank are -inf, though the target's is finite. What does a rank add to the sum "
    "for a target that is not its word?"
)

WRONG = [
    Edit("dist.all_reduce(sums, group=tp.group)\n        picked, partition = sums",
         "dist.all_reduce(picked, group=tp.group)\n        partition = sums[1]",
         mistake="Your softmax is normalised over this rank's words alone."),
    Edit("dist.all_reduce(sums, group=tp.group)\n        picked, partition = sums",
         "partition = sums[1].clone()\n        dist.all_reduce(partition, group=tp.group)",
         mistake="The logit of a target is on one rank, and the others miss it: it is not summed over ranks."),
    Edit(_OWN, "", mistake=_EVERY_TARGET),
    Edit(_OWN, "", _CLAMPED, mistake=_EVERY_TARGET),
    # a rank that has no word with a finite logit
    Edit(_OWN, " * own", mistake=_NO_NUMBER),
    Edit("z.gather(-1, local).squeeze(-1)" + _OWN, "(z * (torch.arange(n) == local * own.unsqueeze(-1)) * "
         "own.unsqueeze(-1)).sum(-1)", mistake=_NO_NUMBER),
    Edit("z.exp().sum(-1)])", "(logits - logits.amax(-1, True)).exp().sum(-1) * (logits.amax(-1) - highest).exp()])",
         mistake="Loss or gradient is nan where all logits of a rank are -inf: -inf minus its own maximum, which is "
                 "-inf, is no number."),
    Edit(_MAX, "", mistake="Each rank subtracted its own maximum: the terms of the sum are on different scales."),
    Edit("z = logits - highest.unsqueeze(-1)", "z = logits",
         mistake="exp() of large logits overflows: the maximum is not subtracted."),
    Edit("ReduceOp.MAX", "ReduceOp.SUM",
         mistake="You added the ranks' maxima: the maximum over all words is the largest of them."),
    Edit("z.gather", "logits.gather",
         mistake="dz is right, the loss is not: the target's logit is taken without the maximum, which is subtracted "
                 "from all others."),
    Edit(" * dloss.unsqueeze(-1)", "", mistake="The loss is right, dz is not: the gradient that arrives is lost."),
    Edit("softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))", "softmax.clone()",
         mistake="The loss is right, dz is not: this is softmax alone, without the target."),
    Edit(_ONE, "torch.ones_like(softmax[..., :1])", mistake=_EVERY_ONE),
    Edit(_ONE, "torch.ones_like(softmax[..., :1])", _CLAMPED, mistake=_EVERY_ONE),
    Edit("n = logits", "ctx.tp = tp\n        n = logits", ("        return dz",
         "        dist.all_reduce(dz, group=ctx.tp.group)\n        return dz"),
         mistake="The loss is right, dz is not: it is summed over ranks. Each rank's dz belongs to its own words."),
    Edit("n = logits", "ctx.tp = tp\n        n = logits", ("dz * dloss", "ctx.tp.size * dz * dloss"),
         mistake="The loss is right, dz is not: it is summed over ranks once too often. The gradient that arrives is "
                 "the same on every rank already."),
    Edit("dloss.unsqueeze(-1)", "dloss.unsqueeze(-1) / dloss.numel()", told="dz is wrong"),
    Edit(_ONE, "(softmax.gather(-1, local) * own.unsqueeze(-1))", told="dz is wrong"),
    Edit("tp.rank *", "dist.get_rank() *"),
    Edit("MAX, group=tp.group", "MAX", ("sums, group=tp.group", "sums")),
    Edit("local < n)", "local < n - 1)"),
    Edit("logits - highest", "logits.data.sub_(highest.unsqueeze(-1)) - 0 * highest",
         told="it changes its input `logits`"),
    Edit("local = target -", "target -= tp.rank * n\n        local = target + tp.rank * n -",
         told="it changes its input `target`"),
    Edit("import torch\n", "from minimegatron.layers.loss import vocab_parallel_cross_entropy\nimport torch\n",
         told="`minimegatron.layers` is closed in this exercise"),
]

EQUIVALENT = [
    Same("line 15: 1 for 0", "the row that is looked up there is masked afterwards"),
]


# %% right: a log-sum-exp of the ranks' log-sum-exps
import torch
import torch.nn.functional as F
from minimegatron.comm import collectives as c
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, target, tp):
        n = z.shape[-1]
        mine = z.logsumexp(-1)
        all_of = c.all_gather(mine[None], tp)
        lse = all_of.logsumexp(0)
        hot = F.one_hot(target, n * tp.size)[..., tp.rank * n : (tp.rank + 1) * n].to(z.dtype)
        at = c.all_reduce(torch.where(hot.bool(), z, 0).sum(-1), tp)
        ctx.save_for_backward((z - lse.unsqueeze(-1)).exp() - hot)
        return lse - at
    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g.unsqueeze(-1), None, None
def cross_entropy(logits, target, tp): return Loss.apply(logits, target, tp)


# %% right: autograd does the gradient, through the conjugate pair
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import reduce_from_region
def cross_entropy(logits, target, tp):
    n = logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
    z = logits - top[..., None]
    local = target - tp.rank * n
    own = (local >= 0) & (local < n)
    picked = torch.where(own, z.gather(-1, local.clamp(0, n - 1)[..., None])[..., 0], 0)
    both = reduce_from_region(torch.stack((z.exp().sum(-1), picked)), tp)
    return both[0].log() - both[1]


# %% right: logsumexp of each rank and the target's logit, gathered and put together
import torch
import torch.distributed as dist
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lse = torch.logsumexp(logits, -1)
        mine = torch.arange(tp.rank * n, (tp.rank + 1) * n)
        hot = target.unsqueeze(-1) == mine
        picked = logits.masked_fill(~hot, 0.0).sum(-1)
        both = torch.stack([lse, picked]).contiguous()
        each = both.new_empty(tp.size * 2, *lse.shape)
        dist.all_gather_into_tensor(each, both, group=tp.group)
        each = each.unflatten(0, (tp.size, 2))
        total = torch.logsumexp(each[:, 0], 0)
        ctx.save_for_backward((logits - total.unsqueeze(-1)).exp() - hot.to(logits.dtype))
        return total - each[:, 1].sum(0)
    @staticmethod
    def backward(ctx, dloss):
        (dz,) = ctx.saved_tensors
        return dz * dloss.unsqueeze(-1), None, None
def cross_entropy(logits, target, tp):
    return Loss.apply(logits, target, tp)


# %% wrong: gathers the logits
# told: three numbers a token
import torch.nn.functional as F
from minimegatron.comm.collectives import gather_from_region
def cross_entropy(logits, target, tp):
    whole = gather_from_region(logits, tp)
    loss = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction='none')
    return loss.view_as(target)
