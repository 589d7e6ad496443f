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
