# one object a microbatch, freed by leaving the list of those under way; addmm into the gradient
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
