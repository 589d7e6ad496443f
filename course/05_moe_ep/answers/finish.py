from labkit.answers import Edit, Same

_DENSE = "all_reduce(dense.clone(), dp)"
_EXPERT = "all_reduce(expert.clone(), edp)"
_EVERY = "all_reduce(torch.tensor(float(tokens)), dp)"
_MEANS = "A mean of means: ranks with few tokens count too much."
_MANY = "The experts are divided once too often, by a number of ranks."

WRONG = [
    Edit(" / every", "", mistake="The sums are not divided yet."),
    Edit(_EVERY, "tokens", mistake="The sums are divided by this rank's tokens. The other ranks have other numbers."),
    Edit(_DENSE, "all_reduce(dense.clone(), edp)", (_EXPERT, "all_reduce(expert.clone(), dp)"),
         mistake="The two axes are exchanged: "
         "every rank of dp holds a copy of the dense weights, every rank of edp one of these experts."),
    Edit(_EXPERT, "all_reduce(expert.clone(), dp)",
         mistake="Ranks of one ep group hold *different* experts. Here their gradients are added to each other."),
    Edit(_EXPERT, "expert",
         mistake="Ranks of edp hold the same experts and saw other tokens, and here each keeps its own gradient."),
    Edit(_DENSE, "all_reduce(dense.clone(), edp)",
         mistake="Every rank of dp holds a copy of the dense weights. Here only those of edp are summed."),
    Edit("edp) / every", f"edp) / {_EVERY.replace('dp)', 'edp)')}",
         mistake="The experts are divided by the tokens of edp alone. "
         "Tokens of *all* ranks reached them, through the all-to-all."),
    Edit("edp) / every", "edp) / every / edp.size", mistake=_MANY),
    Edit("edp) / every", "edp) / every * edp.size / dp.size", mistake=_MANY),
    Edit(f"{_DENSE} / every", "all_reduce(dense / tokens, dp) / dp.size",
         mistake=_MEANS),
    Edit(f"{_DENSE} / every", "all_reduce(dense / tokens, dp) / dp.size",
         (f"{_EXPERT} / every", "all_reduce(expert / tokens, edp) / edp.size"), mistake=_MEANS),
    Edit(f"{_DENSE} / every", "all_reduce(dense / tokens, dp) / dp.size",
         (f"{_EXPERT} / every", "all_reduce(expert / tokens, edp) / dp.size"), mistake=_MEANS),
    Edit("edp) / every", "edp) / every / dp.size"),
    Edit(_EVERY, "tokens * dp.size",
         mistake="The divisor is this rank's tokens times the number of ranks. The other ranks have other numbers of "
         "tokens: sum them."),
    Edit(_EVERY, f"{_EVERY.replace('dp)', 'edp)')} * (dp.size / edp.size)"),
    Edit("edp) / every", f"edp) / ({_EVERY.replace('dp)', 'edp)')} * (dp.size / edp.size))"),
    Edit(_EVERY, _EVERY.replace("dp)", "dp, 'max')")),
    Edit(_DENSE, "dense"),
    Edit(" / every", " / dp.size", (_EVERY, "tokens"),
         mistake="The sums are divided by a number of ranks. The mean is over tokens, and ranks have different numbers "
         "of them."),
    # the tokens are counted twice
    Edit("edp) / every", f"edp) / {_EVERY}", told="summed 2 times"),
    # every rank gathers all gradients
    Edit("    every =", "    whole = [torch.empty_like(dense) for _ in range(dp.size)]\n"
         "    torch.distributed.all_gather(whole, dense.contiguous(), group=dp.group)\n    every =", told="two sums"),
    Edit("    every =", "    if tokens == 0:\n        return dense, expert\n    every =", told="takes part, too"),
]

EQUIVALENT = [Same(f"line 11: `.clone()` dropped{one}", "gradients may be summed in place") for one in ("", " (2)")]


# %% right: in place, the count in int64
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    n = torch.tensor([tokens])
    dist.all_reduce(n, group=dp.group)
    all_reduce(dense, dp)
    all_reduce(expert, edp)
    return dense / n, expert / n


# %% right: one message for all of dp, functional collectives
import torch
from torch.distributed._functional_collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    flat = torch.cat((dense.double(), torch.tensor([tokens], dtype=torch.float64)))
    if dp.size > 1:
        flat = all_reduce(flat, "sum", dp.group) + 0
    e = all_reduce(expert, "sum", edp.group) + 0 if edp.size > 1 else expert
    return (flat[:-1] / flat[-1]).to(dense.dtype), e / flat[-1].to(e.dtype)


# %% right: reduce-scatter and all-gather in place of an all-reduce
import torch
import torch.distributed as dist

def total(x, axis):
    if axis.size == 1:
        return x
    padded = torch.cat((x, x.new_zeros(-len(x) % axis.size)))
    part = x.new_empty(len(padded) // axis.size)
    dist.reduce_scatter(part, list(padded.chunk(axis.size)), group=axis.group)
    whole = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(whole, part, group=axis.group)
    return torch.cat(whole)[: len(x)]

def finish(dense, expert, tokens, dp, edp):
    n = total(torch.tensor([float(tokens)]), dp).item()
    return total(dense, dp) / n, total(expert, edp) / n
