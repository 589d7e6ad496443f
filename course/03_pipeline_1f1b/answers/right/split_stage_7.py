# W is a function that waits for its call
import torch


class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad = weight, torch.zeros_like(weight)
        self.slopes, self.todo = {}, {}

    def forward(self, microbatch, x):
        y = torch.tanh(x @ self.weight)
        self.slopes[microbatch] = x, 1 - y * y
        return y

    def backward(self, microbatch, dy):
        x, slope = self.slopes.pop(microbatch)
        dz = dy * slope
        self.todo[microbatch] = lambda: x.T @ dz
        return dz @ self.weight.T

    def weights(self, microbatch):
        self.grad += self.todo.pop(microbatch)()
