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
