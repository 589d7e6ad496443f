# a table for all stages, by stage and microbatch
import torch
KEPT = {}
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad = weight, torch.zeros_like(weight)
    def forward(self, microbatch, x):
        y = torch.tanh(x @ self.weight)
        KEPT[id(self), microbatch] = x, y
        return y
    def backward(self, microbatch, dy):
        x, y = KEPT[id(self), microbatch]
        dz = dy * (1 - y * y)
        KEPT[id(self), microbatch] = x, dz
        return dz @ self.weight.T
    def weights(self, microbatch):
        x, dz = KEPT.pop((id(self), microbatch))
        self.grad += x.T @ dz
