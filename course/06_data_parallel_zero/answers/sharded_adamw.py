from labkit.answers import Edit, Same

_GATHER = "dist.all_gather_into_tensor(self.weights, self.own.to(self.weights.dtype, copy=True), group=self.group)"
_OWN = "own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]"
_MAIN = "self.own = own.float() if own.dtype == torch.bfloat16 else own"
_MOMENTS = "torch.zeros_like(self.own), torch.zeros_like(self.own)"
_WIDE = "torch.zeros(len(own), dtype=torch.promote_types(own.dtype, torch.float32))"
_DECAY = "for start, stop in self.decay:\n            self.own[start:stop] *= 1 - self.lr * self.weight_decay\n"
_MINE = "chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]"
_OLD = "Each rank has new weights in its own part only; the parts of others are still old. (What is gathered into another tensor is not in `weights`.)"

WRONG = [
    Edit(_GATHER, "pass", mistake=_OLD),
    Edit(
        _GATHER, f"whole = torch.empty_like(self.weights)\n        {_GATHER.replace('self.weights', 'whole')}\n        self.weights = whole",
        mistake=_OLD,
    ),
    Edit(" / (1 - b2**self.t)", "", (" / (1 - b1**self.t)", ""), mistake="The moments begin at 0 and are too small in the first steps: both are divided by 1 - beta^t."),
    Edit(
        _MAIN, "self.own = own", (_MOMENTS, f"{_WIDE}, {_WIDE}"),
        mistake="In bf16 a step that is small beside its weight rounds to nothing: this rank's part is kept in fp32 as well.",
    ),
    Edit("        self.t += 1\n", "        self.t = 1\n", mistake="In the correction of the moments t counts the steps; it stays 1 here."),
    Edit("for start, stop in self.decay:", "for start, stop in [(0, len(self.own))]:", mistake="Weights decay that must not: only the stretches in `decay` do."),
    Edit(_DECAY, "\n", mistake="Nothing decays."),
    Edit(
        "self.own[start:stop] *= 1 - self.lr * self.weight_decay",
        "grad = grad.clone(); grad[start:stop] += self.weight_decay * self.own[start:stop]",
        mistake="The decay goes through the gradient, and so through the moments. In AdamW it stands beside them: that is its W.",
    ),
    Edit(_DECAY, "\n", (_GATHER, f"{_DECAY}        {_GATHER}"), mistake="The weights decay after the update; in AdamW the old weight decays."),
    Edit(".sqrt() + self.eps", ".add(self.eps).sqrt()", mistake="eps is added to the root, not under it."),
    Edit("self.m.lerp_(grad, 1 - b1)", "self.m = grad.clone()", (" / (1 - b1**self.t)", ""), mistake="The first moment is missing: an average of gradients, not the last one."),
    Edit(
        _MOMENTS, _MOMENTS.replace("self.own", "weights"),
        ("self.m.lerp_", f"m, v = (x.{_MINE} for x in (self.m, self.v))\n        m.lerp_"),
        ("self.v.lerp_", "v.lerp_"), ("(self.v /", "(v /"), ("self.lr * self.m /", "self.lr * m /"),
        told="its two moments",
    ),
    # zeros elsewhere, then a sum: twice the bytes
    Edit(
        _GATHER,
        "mine = self.own.clone()\n        self.weights.zero_()\n        self.own += mine\n"
        "        dist.all_reduce(self.weights, group=self.group)",
        told="gathered, not summed",
    ),
    # plain AdamW: the gradient is gathered, and every rank updates everything
    Edit(
        _OWN, "own = weights",
        (
            "        self.t += 1\n",
            "        self.t += 1\n        whole = grad.new_empty(len(self.weights))\n"
            "        dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.group)\n"
            "        grad = whole\n",
        ),
        (_GATHER, "pass"),
    ),
    Edit(_GATHER, _GATHER.replace(", group=self.group", "")),
    Edit("dist.get_rank(group)]", "dist.get_rank()]"),
    Edit("grad * grad", "grad"),
]

RIGHT = [
    Edit(_GATHER, "dist.all_gather(list(self.weights.chunk(dist.get_world_size(self.group))), self.own.to(self.weights.dtype), group=self.group)"),
    Edit(
        "self.m.lerp_(grad, 1 - b1)", "self.m.mul_(b1).add_(grad, alpha=1 - b1)",
        ("self.v.lerp_(grad * grad, 1 - b2)", "self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)"),
    ),
]

EQUIVALENT = [
    Same("line 28: `copy` dropped", "a gather may read the part of its output that it fills"),
]


# %% right: torch's AdamW over views
import torch
import torch.distributed as dist


class ShardedAdamW:
    """torch's AdamW over views."""
    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.group = weights, group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.mine = weights.detach().chunk(ranks)[rank].to(torch.promote_types(weights.dtype, torch.float32))
        cuts = sorted({0, len(self.mine), *(x for pair in decay for x in pair)})
        self.spans = [(a, b) for a, b in zip(cuts, cuts[1:]) if a < b]
        self.params = [torch.nn.Parameter(self.mine[a:b]) for a, b in self.spans]
        groups = [{"params": [p], "weight_decay": weight_decay if any(a <= s[0] and s[1] <= b for a, b in decay) else 0.0}
                  for p, s in zip(self.params, self.spans)]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=False)

    @torch.no_grad()
    def step(self, grad):
        for p, (a, b) in zip(self.params, self.spans):
            p.grad = grad[a:b]
        self.optimizer.step()
        for p in self.params: p.grad = None
        dist.all_gather_into_tensor(self.weights, self.mine.to(self.weights).clone(), group=self.group)


# %% right: moments in lists
import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of this rank's part, in lists of numbers."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.decay, self.group, self.t = weights, decay, group, 0
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)].double()
        self.m = self.v = [0.0] * len(self.own)

    @torch.no_grad()
    def step(self, grad):
        self.t += 1
        b1, b2 = self.betas
        for a, b in self.decay:
            self.own[a:b] *= 1 - self.lr * self.weight_decay
        g = grad.tolist()
        self.m = [b1 * m + (1 - b1) * x for m, x in zip(self.m, g)]
        self.v = [b2 * v + (1 - b2) * x * x for v, x in zip(self.v, g)]
        c1, c2 = 1 - b1**self.t, 1 - b2**self.t
        moves = [self.lr * m / c1 / ((v / c2) ** 0.5 + self.eps) for m, v in zip(self.m, self.v)]
        self.own -= torch.tensor(moves, dtype=self.own.dtype)
        dist.all_gather_into_tensor(self.weights, self.own.to(self.weights.dtype), group=self.group)
