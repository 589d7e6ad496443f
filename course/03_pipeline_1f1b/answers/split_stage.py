from labkit.answers import Edit

WRONG = [
    Edit("self.grad += x.T @ dz", "self.grad = x.T @ dz", told="that of the last W alone; each W *adds*"),
    Edit("(1 - y * y)", "(1 - y)", told="1 - y², not 1 - y"),
    Edit("(1 - y * y)", "(1 - x * x)", told="of the output; this takes x"),
    Edit("dz @ self.weight.T", "dy @ self.weight.T", told="the slope of tanh is missing"),
    Edit("dz @ self.weight.T", "dz @ self.weight", told="the weight is to be transposed"),
    Edit("self.kept[microbatch] = x, dz", "self.kept[microbatch] = x, dy", told="it adds up x.T @ dy"),
    Edit("x.T @ dz", "dz.T @ x", told="the gradient transposed"),
    # two stages on a rank share what they keep
    Edit(
        "    def __init__(self, weight: torch.Tensor):\n",
        "    kept = {}\n\n    def __init__(self, weight: torch.Tensor):\n",
        ("        self.kept = {}  # by microbatch\n", ""),
        told="belongs to each stage",
    ),
    # y computed again in B
    Edit(
        "x, y = self.kept[microbatch]",
        "x, y = self.kept[microbatch]\n        y = torch.tanh(x @ self.weight)",
        told="one product each is enough: B needs only dz @ W.T",
    ),
    # both halves in B
    Edit(
        """        x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz""",
        "        pass",
        (
            "return dz @ self.weight.T",
            """self.grad += x.T @ dz
        return dz @ self.weight.T""",
        ),
        told="has changed before its W",
    ),
    # computed in B, only handed over in W
    Edit(
        "self.kept[microbatch] = x, dz\n",
        "self.kept[microbatch] = x.T @ dz\n",
        (
            """x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz""",
            "self.grad += self.kept.pop(microbatch)",
        ),
        told="x.T @ dz belongs to W",
    ),
    # changes dy
    Edit("dz = dy * (1 - y * y)", "dz = dy.mul_(1 - y * y)", told="changes"),
    # changes the output later
    Edit("dz = dy * (1 - y * y)", "dz = dy * y.square_().neg_().add_(1)", told="after it has returned it"),
    # collects its products
    Edit(
        """self.weight = weight
        self.grad = torch.zeros_like(weight)
        self.kept = {}  # by microbatch""",
        """self.weight, self.grad = weight, torch.zeros_like(weight)
        self.kept, self.parts = {}, []""",
        (
            "self.grad += x.T @ dz",
            """self.parts.append(x.T @ dz)
        self.grad = sum(self.parts)""",
        ),
        told="x.T @ dz of past microbatches",
    ),
    # first batch only
    Edit(
        "self.grad += x.T @ dz",
        """self.done = getattr(self, 'done', set())
        if microbatch not in self.done:
            self.done.add(microbatch)
            self.grad += x.T @ dz""",
        told="number that was there before, is left out",
    ),
    # frees every second
    Edit("pop(microbatch)", "pop(microbatch) if microbatch % 2 == 0 else self.kept[microbatch]", told="still kept"),
    # gradient in float32
    Edit("self.grad = torch.zeros_like(weight)", "self.grad = torch.zeros(weight.shape)", told="float64"),
    # keeps the output gradient
    Edit(
        "dz = dy * (1 - y * y)",
        """dz = dy * (1 - y * y)
        self.seen = [*getattr(self, 'seen', []), dy]""",
        told="still kept",
    ),
    # keeps y too
    Edit(
        "self.kept[microbatch] = x, y",
        """self.kept[microbatch] = x, y
        self.kept['y', microbatch] = y""",
        told="still kept",
    ),
    # mean over tokens
    Edit("self.grad += x.T @ dz", "self.grad += x.T @ dz / len(x)", told="divides by the number of tokens"),
    # product by hand in b
    Edit(
        "kept[microbatch] = x, dz",
        "kept[microbatch] = (x[:, :, None] * dz[:, None, :]).sum(0)",
        (
            """x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz""",
            "self.grad += self.kept.pop(microbatch)",
        ),
        told="belongs to W",
    ),
    # steps at once
    Edit(
        "self.grad += x.T @ dz",
        """self.grad += x.T @ dz
        self.weight -= 0.01 * self.grad""",
        told="changes",
    ),
]


# %% right: autograd, asked twice
import torch
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad = weight, torch.zeros_like(weight)
        self.kept = {}
    def forward(self, i, x):
        x = x.requires_grad_()
        w = self.weight.detach().requires_grad_()
        y = torch.tanh(x @ w)
        self.kept[i] = x, w, y
        return y.detach()
    def backward(self, i, dy):
        x, w, y = self.kept[i]
        self.kept[i] = x, w, y, dy
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    def weights(self, i):
        x, w, y, dy = self.kept.pop(i)
        self.grad += torch.autograd.grad(y, w, dy)[0]


# %% right: three dicts, and einsum
import torch
class SplitStage:
    def __init__(self, weight):
        self.weight = weight
        self.grad = weight * 0
        self.xs, self.ys, self.dzs = {}, {}, {}
    def forward(self, microbatch, x):
        self.xs[microbatch] = x
        self.ys[microbatch] = x.matmul(self.weight).tanh()
        return self.ys[microbatch]
    def backward(self, microbatch, dy):
        self.dzs[microbatch] = (1 - self.ys.pop(microbatch) ** 2) * dy
        return torch.einsum('bj,ij->bi', self.dzs[microbatch], self.weight)
    def weights(self, microbatch):
        x, dz = self.xs.pop(microbatch), self.dzs.pop(microbatch)
        self.grad = self.grad + torch.einsum('bi,bj->ij', x, dz)


# %% right: one object a microbatch, freed by leaving the list of those under way; addmm into the gradient
import torch
from dataclasses import dataclass
@dataclass(eq=False)
class Work:
    i: int
    x: torch.Tensor
    slope: torch.Tensor
    dz: torch.Tensor = None
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad, self.open = weight, torch.zeros_like(weight), []
        self.transposed = weight.t().contiguous()
    def find(self, i):
        return next(w for w in self.open if w.i == i)
    def forward(self, i, x):
        y = torch.nn.functional.linear(x, self.transposed).tanh()
        self.open.append(Work(i, x, 1 - y.square()))
        return y
    def backward(self, i, dy):
        work = self.find(i)
        work.dz, work.slope = dy.mul(work.slope), None
        return work.dz.mm(self.transposed)
    def weights(self, i):
        work = self.find(i)
        self.open.remove(work)
        torch.addmm(self.grad, work.x.t(), work.dz, out=self.grad)


# %% right: lists with a place for every microbatch, emptied by None; copies of what comes in; NumPy for the sum
import torch
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad = weight, torch.zeros_like(weight)
        self.x, self.y, self.dz = ([None] * 64 for _ in range(3))
    def forward(self, i, x):
        self.x[i] = x.clone()
        self.y[i] = torch.tanh(x @ self.weight)
        return self.y[i].clone()
    def backward(self, i, dy):
        self.dz[i] = dy - dy * self.y[i] ** 2
        self.y[i] = None
        return self.dz[i] @ self.weight.T
    def weights(self, i):
        self.grad += torch.from_numpy(self.x[i].numpy().T @ self.dz[i].numpy())
        self.x[i] = self.dz[i] = None


# %% empty
# A stage that holds the gradient which the check reads, and whose methods return None.
import torch
class SplitStage:
    def __init__(self, weight): self.grad = torch.zeros_like(weight)
    def forward(self, *args): return None
    def backward(self, *args): return None
    def weights(self, *args): return None
# %% wrong: b frees x
# told: what F keeps, B and W both need
import torch


class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad, self.kept = weight, torch.zeros_like(weight), {}

    def forward(self, microbatch, x):
        y = torch.tanh(x @ self.weight)
        self.kept[microbatch] = x, y
        return y

    def backward(self, microbatch, dy):
        x, y = self.kept.pop(microbatch)
        self.dz = dy * (1 - y * y)
        return self.dz @ self.weight.T

    def weights(self, microbatch):
        x, y = self.kept.pop(microbatch)
        self.grad += x.T @ self.dz


# %% wrong: one call of autograd
# told: belongs to W
import torch


class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad, self.kept = weight, torch.zeros_like(weight), {}

    def forward(self, microbatch, x):
        x, w = x.detach().clone().requires_grad_(), self.weight.detach().clone().requires_grad_()
        self.kept[microbatch] = x, w, torch.tanh(x @ w)
        return self.kept[microbatch][2].detach()

    def backward(self, microbatch, dy):
        x, w, y = self.kept.pop(microbatch)
        y.backward(dy)
        self.kept[microbatch] = w.grad
        return x.grad

    def weights(self, microbatch):
        self.grad += self.kept.pop(microbatch)


