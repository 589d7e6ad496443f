# told: with y of another microbatch
import torch


class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad = weight, torch.zeros_like(weight)

    def forward(self, microbatch, x):
        self.x, self.y = x, torch.tanh(x @ self.weight)
        return self.y

    def backward(self, microbatch, dy):
        self.dz = dy * (1 - self.y * self.y)
        return self.dz @ self.weight.T

    def weights(self, microbatch):
        self.grad += self.x.T @ self.dz
