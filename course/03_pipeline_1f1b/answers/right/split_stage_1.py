# autograd, asked twice
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
