from labkit.answers import Edit, Same

_MASKED = "the row that is looked up there is masked afterwards"

WRONG = [
    Edit(
        """sums = torch.stack([picked, z.exp().sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        picked, partition = sums""",
        """dist.all_reduce(picked, group=tp.group)
        partition = z.exp().sum(-1)""",
        mistake="Your softmax is normalised over this rank's words alone.",
    ),
    Edit("        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)\n", "", told="max over ranks"),
    Edit("z = logits - highest.unsqueeze(-1)", "z = logits", mistake="exp() of large logits overflows: the maximum is not subtracted."),
    Edit(" * dloss.unsqueeze(-1)", "", mistake="The loss is right, dz is not: the gradient that arrives is lost."),
    Edit("softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))", "softmax.clone()", told="minus one"),
    Edit("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM", mistake="You added the ranks' maxima: the maximum over all words is the largest of them."),
    # by the rank in the world
    Edit("local = target - tp.rank * n", "local = target - dist.get_rank() * n"),
    # changes the logits
    Edit("z = logits - highest.unsqueeze(-1)", "z = logits.sub_(highest.unsqueeze(-1))"),
    # changes the target
    Edit(
        "local = target - tp.rank * n",
        """target -= tp.rank * n
        local = target""",
    ),
    # gradient of the mean
    Edit("dloss.unsqueeze(-1)", "dloss.unsqueeze(-1) / dloss.numel()", mistake="The loss is right, the gradient dz is not: look at the backward pass alone."),
    # gradient of the softmax alone
    Edit("unsqueeze(-1).to(softmax.dtype)", "unsqueeze(-1) * softmax.gather(-1, local)"),
    # gradient summed over ranks
    Edit(
        "picked, partition = sums",
        """picked, partition = sums
        ctx.tp = tp""",
        (
            "dz = softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))",
            """dz = softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))
        dloss = dloss.clone()
        dist.all_reduce(dloss, group=ctx.tp.group)""",
        ),
        mistake="The loss is right, dz is not: it is summed over ranks once too often. The gradient that arrives " "is the same on every rank already.",
    ),
    # last word of a rank lost
    Edit("own = (local >= 0) & (local < n)", "own = (local >= 0) & (local < n - 1)"),
    # minus one on every rank
    Edit("own.unsqueeze(-1).to(softmax.dtype)", "torch.ones_like(softmax[..., :1])", mistake="The loss is right, dz is not: the gradient that arrives is lost."),
    # without the group
    Edit("MAX, group=tp.group", "MAX", ("dist.all_reduce(sums, group=tp.group)", "dist.all_reduce(sums)")),
]

EQUIVALENT = [
    Same("line 15: 1 for 0", _MASKED),
]


# %% right: a log-sum-exp of the ranks' log-sum-exps
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, target, tp):
        n = z.shape[-1]
        mine = z.logsumexp(-1)
        all_of = c.all_gather(mine[None], tp)
        lse = all_of.logsumexp(0)
        hot = F.one_hot(target, n * tp.size)[..., tp.rank * n : (tp.rank + 1) * n].to(z.dtype)
        at = c.all_reduce((z * hot).sum(-1), tp)
        ctx.save_for_backward((z - lse.unsqueeze(-1)).exp() - hot)
        return lse - at
    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g.unsqueeze(-1), None, None
def cross_entropy(logits, target, tp): return Loss.apply(logits, target, tp)


# %% right: autograd does the gradient, through the conjugate pair
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def cross_entropy(logits, target, tp):
    n = logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
    z = logits - top[..., None]
    local = target - tp.rank * n
    own = (local >= 0) & (local < n)
    picked = z.gather(-1, local.clamp(0, n - 1)[..., None])[..., 0] * own
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


# %% right: each rank's logsumexp gathered
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lo = tp.rank * n
        mine = (target >= lo) & (target < lo + n)
        local = torch.where(mine, target - lo, 0)
        own = logits.logsumexp(-1)
        parts = [torch.empty_like(own) for _ in range(tp.size)]
        dist.all_gather(parts, own, group=tp.group)
        total = torch.stack(parts).logsumexp(0)
        hit = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
        dist.all_reduce(hit, group=tp.group)
        ctx.save_for_backward((logits - total.unsqueeze(-1)).exp(), local, mine)
        return total - hit

    @staticmethod
    def backward(ctx, dloss):
        p, local, mine = ctx.saved_tensors
        grad = p.clone()
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(p.dtype).unsqueeze(-1))
        return grad * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return VocabParallelCrossEntropy.apply(logits, target, tp)


# %% wrong: back through the maximum
# mistake: The loss is right, dz is not: autograd goes back through the maximum. It shifts all terms and has no part in the gradient.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region

def cross_entropy(logits, target, tp):
    n = logits.shape[-1]
    lo = tp.rank * n
    mine = (target >= lo) & (target < lo + n)
    local = torch.where(mine, target - lo, 0)
    top = logits.amax(-1).clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
    z = logits - top.unsqueeze(-1)
    total = reduce_from_region(z.exp().sum(-1), tp)
    hit = reduce_from_region(z.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine, tp)
    return total.log() - hit


# %% wrong: target not summed
# mistake: The logit of a target is on one rank, and the others miss it: it is not summed over ranks.
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lo = tp.rank * n
        mine = (target >= lo) & (target < lo + n)
        local = torch.where(mine, target - lo, 0)
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
        z = logits - top.unsqueeze(-1)
        e = z.exp()
        total = e.sum(-1)
        hit = z.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
        dist.all_reduce(total, group=tp.group)
        ctx.save_for_backward(e / total.unsqueeze(-1), local, mine)
        return total.log() - hit

    @staticmethod
    def backward(ctx, dloss):
        p, local, mine = ctx.saved_tensors
        grad = p.clone()
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(p.dtype).unsqueeze(-1))
        return grad * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return VocabParallelCrossEntropy.apply(logits, target, tp)


# %% wrong: target of every rank
# mistake: Every rank adds a logit for every target, also where the target is not its own word.
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lo = tp.rank * n
        mine = (target >= lo) & (target < lo + n)
        local = torch.where(mine, target - lo, 0)
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
        z = logits - top.unsqueeze(-1)
        e = z.exp()
        total = e.sum(-1)
        hit = z.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        dist.all_reduce(total, group=tp.group)
        dist.all_reduce(hit, group=tp.group)
        ctx.save_for_backward(e / total.unsqueeze(-1), local, mine)
        return total.log() - hit

    @staticmethod
    def backward(ctx, dloss):
        p, local, mine = ctx.saved_tensors
        grad = p.clone()
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(p.dtype).unsqueeze(-1))
        return grad * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return VocabParallelCrossEntropy.apply(logits, target, tp)


# %% wrong: target without the maximum
# mistake: The gradient dz is right, the loss is not.
import torch
import torch.distributed as dist


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        exps = (logits - highest.unsqueeze(-1)).exp()
        local = target - tp.rank * n
        own = (local >= 0) & (local < n)
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        sums = torch.stack([logits.gather(-1, local).squeeze(-1) * own, exps.sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        ctx.save_for_backward(exps / sums[1].unsqueeze(-1), local, own)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, dloss):
        softmax, local, own = ctx.saved_tensors
        dz = softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))
        return dz * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return Loss.apply(logits, target, tp)
# %% wrong: gathers the logits
# told: Three numbers a token
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def cross_entropy(logits, target, tp):
    whole = gather_from_region(logits, tp)
    loss = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction='none')
    return loss.view_as(target)


# %% wrong: of the package
# told: `minimegatron.layers` is closed in this exercise
from minimegatron.layers.loss import vocab_parallel_cross_entropy as cross_entropy


