# vector-Jacobian products of torch.func, one for x at B, one for the weight at W
import torch
from torch.func import vjp
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad, self.kept = weight, torch.zeros_like(weight), {}
    def forward(self, i, x):
        y = (x @ self.weight).tanh()
        self.kept[i] = [x, y]
        return y.clone()
    def backward(self, i, dy):
        x, y = self.kept.pop(i)
        dz = torch.ops.aten.tanh_backward(dy, y)
        self.kept[i] = [x, dz]
        return torch.nn.functional.linear(dz, self.weight)
    def weights(self, i):
        x, dz = self.kept.pop(i)
        self.grad += vjp(lambda w: x @ w, self.weight)[1](dz)[0]
