# told: divides by the number of tokens
import torch


class SplitStage:
    def __init__(self, weight):
        self.weight = weight
        self.grad = torch.zeros_like(weight)
        self.kept = {}

    def forward(self, microbatch, x):
        y = torch.tanh(x @ self.weight)
        self.kept[microbatch] = x, y
        return y

    def backward(self, microbatch, dy):
        x, y = self.kept[microbatch]
        dz = dy * (1 - y * y)
        self.kept[microbatch] = x, dz
        return dz @ self.weight.T

    def weights(self, microbatch):
        x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz / len(x)
