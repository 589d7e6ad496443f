from labkit.answers import Edit, Same

_GATHER = "dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)"

WRONG = [
    Edit(
        "torch.zeros_like(self.own), torch.zeros_like(self.own)",
        "torch.zeros_like(weights), torch.zeros_like(weights)",
        (
            "self.m.lerp_",
            "m, v = (x.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)] "
            "for x in (self.m, self.v))\n        m.lerp_",
        ),
        ("self.v.lerp_", "v.lerp_"),
        ("(self.v /", "(v /"),
        ("self.lr * self.m /", "self.lr * m /"),
        told="keeps",
    ),
    Edit(_GATHER, "pass", mistake="Each rank has new weights in its own part only; the parts of others are still old. (What is " "gathered into another tensor is not in `weights`.)"),
    Edit(
        _GATHER,
        "whole = torch.empty_like(self.weights)\n        "
        "dist.all_gather_into_tensor(whole, self.own.clone(), group=self.group)\n        self.weights = whole",
        mistake="Each rank has new weights in its own part only; the parts of others are still old. (What is " "gathered into another tensor is not in `weights`.)",
    ),
    Edit(" / (1 - b2**self.t)", "", (" / (1 - b1**self.t)", ""), mistake="The moments begin at 0 and are too small in the first steps: both are divided by 1 - beta^t."),
    Edit("        self.t += 1\n", "        self.t = 1\n", mistake="In the correction of the moments t counts the steps; it stays 1 here."),
    Edit("for start, stop in self.decay:", "for start, stop in [(0, len(self.own))]:", mistake="Weights decay that must not: only the stretches in `decay` do."),
    Edit("self.own[start:stop] *= 1 - self.lr * self.weight_decay", "pass", mistake="Nothing decays."),
    Edit(
        "self.own[start:stop] *= 1 - self.lr * self.weight_decay",
        "grad = grad.clone(); grad[start:stop] += self.weight_decay * self.own[start:stop]",
        mistake="Nothing decays.",
    ),
    Edit(".sqrt() + self.eps", ".add(self.eps).sqrt()", mistake="eps is added to the root, not under it."),
    # zeros elsewhere, then a sum: twice the bytes
    Edit(
        _GATHER,
        "mine = self.own.clone()\n        self.weights.zero_()\n        self.own += mine\n"
        "        dist.all_reduce(self.weights, group=self.group)",
        told="gathered, not summed",
    ),
    # plain AdamW: the gradient is gathered, and every rank updates everything
    Edit(
        "self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]",
        "self.own = weights",
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
    Edit(
        _GATHER,
        "dist.all_gather(list(self.weights.chunk(dist.get_world_size(self.group))), self.own.clone(), "
        "group=self.group)",
    ),
    Edit(
        "self.m.lerp_(grad, 1 - b1)",
        "self.m.mul_(b1).add_(grad, alpha=1 - b1)",
        ("self.v.lerp_(grad * grad, 1 - b2)", "self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)"),
    ),
]

EQUIVALENT = [
    Same("line 27: `.clone()` dropped", "a gather may read the part of its output that it fills"),
]


# %% right: moments of a slice
import torch
import torch.distributed as dist


class ShardedAdamW:
    def __init__(
        self, weights: torch.Tensor, decay: list[tuple[int, int]], lr: float, weight_decay: float,
        betas: tuple[float, float], eps: float, group: dist.ProcessGroup | None = None,
    ):
        """weights [n], n divides by the number of ranks of `group`."""
        self.weights, self.decay, self.lr, self.weight_decay = weights, decay, lr, weight_decay
        self.betas, self.eps, self.group, self.t = betas, eps, group, 0
        self.mine = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m = torch.zeros_like(self.mine)
        self.v = torch.zeros_like(self.mine)

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> None:
        """grad: of this rank's part. Afterwards `weights` is new everywhere, on every rank."""
        self.t += 1
        b1, b2 = self.betas
        for a, b in self.decay:
            self.mine[a:b] *= 1 - self.lr * self.weight_decay
        self.m.mul_(b1).add_(grad, alpha=1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        self.mine -= self.lr * (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        dist.all_gather_into_tensor(self.weights, self.mine, group=self.group)


# %% right: torch's AdamW over views
import torch
import torch.distributed as dist


class ShardedAdamW:
    """torch's AdamW over views."""
    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.group = weights, group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.mine = weights.detach().chunk(ranks)[rank]
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
        dist.all_gather_into_tensor(self.weights, self.mine.clone(), group=self.group)


# %% right: moments in NumPy arrays
import numpy
import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of this rank's part, in numpy arrays."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.decay, self.group, self.t = weights, decay, group, 0
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m, self.v = (numpy.zeros_like(self.own.numpy()) for _ in range(2))

    @torch.no_grad()
    def step(self, grad):
        self.t += 1
        b1, b2 = self.betas
        for a, b in self.decay:
            self.own[a:b] *= 1 - self.lr * self.weight_decay
        g, w = grad.numpy(), self.own.numpy()
        self.m += (1 - b1) * (g - self.m)
        self.v += (1 - b2) * (g * g - self.v)
        w -= self.lr * self.m / (1 - b1**self.t) / (numpy.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)


# %% right: moments in lists
import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of this rank's part, in lists of numbers."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.decay, self.group, self.t = weights, decay, group, 0
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
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
        dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)


# %% wrong: decay through the gradient
# mistake: The decay goes through the gradient, and so through the moments. In AdamW it stands beside them: that is its W.
import torch
import torch.distributed as dist


class ShardedAdamW:
    def __init__(
        self, weights: torch.Tensor, decay: list[tuple[int, int]], lr: float, weight_decay: float,
        betas: tuple[float, float], eps: float, group: dist.ProcessGroup | None = None,
    ):
        """weights [n], n divides by the number of ranks of `group`."""
        self.weights, self.decay, self.lr, self.weight_decay = weights, decay, lr, weight_decay
        self.betas, self.eps, self.group, self.t = betas, eps, group, 0
        self.mine = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m = torch.zeros_like(self.mine)
        self.v = torch.zeros_like(self.mine)

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> None:
        """grad: of this rank's part. Afterwards `weights` is new everywhere, on every rank."""
        self.t += 1
        b1, b2 = self.betas
        grad = grad.clone()
        for a, b in self.decay:
            grad[a:b] += self.weight_decay * self.mine[a:b]
        self.m.mul_(b1).add_(grad, alpha=1 - b1)
        self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        self.mine -= self.lr * (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        dist.all_gather_into_tensor(self.weights, self.mine.clone(), group=self.group)


# %% wrong: state in bytearrays
# told: the moments of all weights
import numpy
import torch
import torch.distributed as dist


class ShardedAdamW:
    """Moments of all weights, in bytearrays: the gradient is gathered, and every rank updates everything."""

    def __init__(self, weights, decay, lr, weight_decay, betas, eps, group=None):
        self.weights, self.lr, self.betas, self.eps, self.group, self.t = weights, lr, betas, eps, group, 0
        ranks = dist.get_world_size(group)
        ends, every = torch.zeros(4, dtype=torch.int32), torch.zeros(4 * ranks, dtype=torch.int32)
        for i, (a, b) in enumerate(decay):
            ends[2 * i], ends[2 * i + 1] = a, b
        dist.all_gather_into_tensor(every, ends, group=group)
        part = len(weights) // ranks
        of_ranks = enumerate(every.view(ranks, 2, 2).tolist())
        self.shrink = [(r * part + a, r * part + b) for r, spans in of_ranks for a, b in spans]
        self.kept = 1 - lr * weight_decay
        self.m, self.v = bytearray(weights.nbytes), bytearray(weights.nbytes)

    @torch.no_grad()
    def step(self, grad):
        whole = torch.empty_like(self.weights)
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.group)
        g, w, (b1, b2) = whole.numpy(), self.weights.numpy(), self.betas
        self.t += 1
        for a, b in self.shrink:
            w[a:b] *= self.kept
        m, v = (numpy.frombuffer(moments, g.dtype) for moments in (self.m, self.v))
        m += (1 - b1) * (g - m)
        v += (1 - b2) * (g * g - v)
        w -= self.lr * m / (1 - b1**self.t) / (numpy.sqrt(v / (1 - b2**self.t)) + self.eps)


