from labkit.answers import Edit

_DZ, _KEEP, _ADD = "dz = dy * (1 - y * y)", "self.kept[microbatch] = x, dz", "self.grad += x.T @ dz"
_POP = "x, dz = self.kept.pop(microbatch)\n        "

WRONG = [
    Edit(_ADD, "self.grad = x.T @ dz", mistake="This keeps the gradient of the last W alone; each W *adds* its part."),
    Edit("dz @ self.weight.T", "dy @ self.weight.T", mistake="B returns dy @ W.T here; the slope of tanh is missing."),
    Edit(_KEEP, "self.kept[microbatch] = x, dy", mistake="W adds x.T @ dy here; the slope of tanh is missing."),
    Edit(_DZ, "dz = dy", mistake="B and W take dy for dz here; the slope of tanh is missing in both."),
    Edit("(1 - y * y)", "(1 - y)", mistake="The slope of tanh is 1 - y², not 1 - y."),
    Edit(_ADD, _ADD + " / len(x)", mistake="Each W divides by the number of tokens here; nothing is averaged."),
    Edit("return y", "self.y = y\n        return y", ("x, y = self.kept[microbatch]", "x, y = self.kept[microbatch][0], self.y"), told="dx: got | dx is wrong"),
    Edit(_KEEP, "self.kept[microbatch], self.dz = (x, dz), dz", (_ADD, "self.grad += x.T @ self.dz"), told="grad is wrong"),
    Edit(_ADD, "self.done = getattr(self, 'done', set())\n        if microbatch not in self.done:\n            self.done.add(microbatch)\n            " + _ADD, mistake="A microbatch of the next batch, with a number that was there before, is left out here."),
    Edit("    def __init__", "    kept = {}\n\n    def __init__", ("        self.kept = {}  # by microbatch\n", ""), mistake="What is kept belongs to each stage (`self`), not to the class: a second stage on the same rank has microbatches with the same numbers."),
    Edit("(1 - y * y)", "(1 - x * x)", told="must match the size | is wrong"),
    Edit("dz @ self.weight.T", "dz @ self.weight", told="cannot be multiplied | is wrong"),
    Edit("x.T @ dz", "dz.T @ x", told="must match the size"),
    Edit("x, y = self.kept[microbatch]", "x, y = self.kept[microbatch]\n        y = torch.tanh(x @ self.weight)", told="one product each is enough: B needs only dz @ W.T"),
    Edit(_POP + _ADD, "pass", ("return dz @", f"{_ADD}\n        return dz @"), told="has changed before its W"),
    Edit(_KEEP, "self.kept[microbatch] = x.T @ dz", (_POP + _ADD, "self.grad += self.kept.pop(microbatch)"), told="x.T @ dz belongs to W"),
    Edit(_KEEP, "self.kept[microbatch] = (x[:, :, None] * dz[:, None, :]).sum(0)", (_POP + _ADD, "self.grad += self.kept.pop(microbatch)"), told="belongs to W"),
    Edit(_DZ, "dz = dy.mul_(1 - y * y)", told="changes dy"),
    Edit(_DZ, "dz = dy * y.square_().neg_().add_(1)", told="after it has returned it"),
    Edit("        self.kept = {}", "        self.parts, self.kept = [], {}", (_ADD, "self.parts.append(x.T @ dz)\n        self.grad = sum(self.parts)"), told="x.T @ dz of past microbatches"),
    Edit(".pop(microbatch)", "[microbatch]", told="still kept"),
    Edit("pop(microbatch)", "pop(microbatch) if microbatch % 2 == 0 else self.kept[microbatch]", told="still kept"),
    Edit("self.kept[microbatch] = x, y", "self.kept[microbatch] = x, y\n        self.kept['y', microbatch] = y", told="still kept"),
    Edit(_DZ, _DZ + "\n        self.seen = [*getattr(self, 'seen', []), dy]", told="still kept"),
    Edit("self.grad = torch.zeros_like(weight)", "self.grad = torch.zeros(weight.shape)", told="float64"),
    Edit(_ADD, _ADD + "\n        self.weight -= 0.01 * self.grad", told="changes its input `weight`"),
    Edit("x, y = self.kept[microbatch]", "x, y = self.kept.pop(microbatch)", (_KEEP, "self.dz = dz"), (_POP, "x, y = self.kept.pop(microbatch)\n        dz = self.dz\n        "), told="what F keeps, B and W both need"),
]

RIGHT = [
    Edit(_ADD, "self.grad = self.grad + torch.einsum('bi,bj->ij', x, dz)"),
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


# %% empty
# A stage that holds the gradient which the check reads, and whose methods return None.
import torch
class SplitStage:
    def __init__(self, weight): self.grad = torch.zeros_like(weight)
    def forward(self, *args): return None
    def backward(self, *args): return None
    def weights(self, *args): return None
