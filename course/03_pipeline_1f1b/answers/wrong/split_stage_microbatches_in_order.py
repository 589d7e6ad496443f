# told: y of another microbatch
import torch


class SplitStage:
    def __init__(self, weight):
        self.weight = weight
        self.grad = torch.zeros_like(weight)
        self.forwards, self.backwards = [], []

    def forward(self, microbatch, x):
        y = torch.tanh(x @ self.weight)
        self.forwards.append((x, y))
        return y

    def backward(self, microbatch, dy):
        x, y = self.forwards.pop(0)
        dz = dy * (1 - y * y)
        self.backwards.append((x, dz))
        return dz @ self.weight.T

    def weights(self, microbatch):
        x, dz = self.backwards.pop(0)
        self.grad += x.T @ dz
