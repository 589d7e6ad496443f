# lists with a place for every microbatch, emptied by None; copies of what comes in; NumPy for the sum
import torch
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad = weight, torch.zeros_like(weight)
        self.x, self.y, self.dz = ([None] * 64 for _ in range(3))
    def forward(self, i, x):
        self.x[i] = x.clone()
        self.y[i] = torch.tanh(x @ self.weight)
        return self.y[i].clone()
    def backward(self, i, dy):
        self.dz[i] = dy - dy * self.y[i] ** 2
        self.y[i] = None
        return self.dz[i] @ self.weight.T
    def weights(self, i):
        self.grad += torch.from_numpy(self.x[i].numpy().T @ self.dz[i].numpy())
        self.x[i] = self.dz[i] = None
