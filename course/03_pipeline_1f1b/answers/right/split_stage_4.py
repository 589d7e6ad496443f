# closures: B and W are functions that forward and backward leave behind
import torch
class SplitStage:
    def __init__(self, weight):
        self.weight, self.grad, self.todo = weight, torch.zeros_like(weight), {}
    def forward(self, i, x):
        y = (x @ self.weight).tanh()
        def b(dy):
            dz = dy * (1 - y**2)
            self.todo["W", i] = lambda: x.t() @ dz
            return dz @ self.weight.t()
        self.todo["B", i] = b
        return y
    def backward(self, i, dy):
        return self.todo.pop(("B", i))(dy)
    def weights(self, i):
        self.grad = torch.add(self.grad, self.todo.pop(("W", i))())
