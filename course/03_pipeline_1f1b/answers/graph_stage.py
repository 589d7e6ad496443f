from labkit.answers import Edit, Same

_LEAF, _EDGE = "x = x.detach().requires_grad_()", "torch.autograd.graph.get_gradient_edge(y)"
_BACK = "torch.autograd.backward(edge, dy)"

WRONG = [
    Edit(_BACK, "x.grad = torch.autograd.grad(y, x, dy)[0]", (_EDGE, "y"), ("x, edge = self", "x, y = self"), mistake="`torch.autograd.grad` returns the gradient of the input and gives the parameters none; `torch.autograd.backward` gives one to both."),
    Edit(_EDGE, "y", told="its place in the graph, not its numbers"),
    Edit(".pop(i)", "[i]", told="still kept"),
    Edit(f"{_BACK}\n        return None if x is None else x.grad", "return None if x is None else torch.autograd.grad(edge, x, dy)[0]", mistake="`torch.autograd.grad` returns the gradient of the input and gives the parameters none; `torch.autograd.backward` gives one to both."),
    Edit(_LEAF, "x = x.detach()", mistake="The input asks for no gradient here, so the backward leaves none in it. A tensor from a message has no graph."),
    Edit(_LEAF, "x = x.requires_grad_().clone()", mistake="The input asks for no gradient here, so the backward leaves none in it. A tensor from a message has no graph."),
    Edit("return y.detach()", "return y", told="with its graph"),
    Edit("self.kept[i] = x,", "self.x, self.kept[i] = x, (None,", (_EDGE, _EDGE + ")"), ("x, edge = self.kept.pop(i)", "x, edge = self.x, self.kept.pop(i)[1]"), told="dx"),
    Edit("return None if x is None else x.grad", "return x.grad", told="On the first stage of a pipeline"),
    Edit(_BACK, "torch.autograd.backward(edge, torch.ones_like(dy) if dy is not None else None)", told="dx"),
    Edit("x is not None", "True", told="NoneType"),
    Edit("return None if x is None else x.grad", "return dy if x is None else x.grad * 1", ("self.kept = {}", "self.kept, self.old = {}, []"), (_BACK, _BACK + "\n        self.old.append(x)"), told="still kept | dx"),
    Edit("torch.autograd.graph.get_gradient_edge(y)", "y", ("return y.detach()", "out = y.detach().clone()\n        y.data = torch.empty(0)\n        return out"), told="compares the shape"),
]

RIGHT = [
    Edit(_LEAF, "x = x.clone().detach()\n            x.requires_grad = True"),
    Edit(_LEAF, "x.requires_grad_()"),
    Edit(_BACK, "torch.autograd.backward([edge], None if dy is None else [dy])"),
]

EQUIVALENT = [
    Same("line 13: `.detach()` dropped", "what comes out of a message has no graph to cut"),
]


# %% right: a hook of the engine: y.grad_fn and the number of its output
import torch
from torch.autograd.graph import GradientEdge
class GraphStage:
    def __init__(self, function):
        self.f, self.open = function, {}
    def forward(self, i, x):
        leaf = None if x is None else x.detach().requires_grad_(True)
        with torch.enable_grad():
            y = self.f(i, leaf)
        self.open[i] = (leaf, GradientEdge(y.grad_fn, y.output_nr))
        return y.detach()
    def backward(self, i, dy):
        leaf, edge = self.open.pop(i)
        torch.autograd.backward((edge,), None if dy is None else (dy,))
        return leaf.grad if leaf is not None else None
    def weights(self, i):
        pass


# %% wrong: what is kept belongs to the module
# mistake: What is kept belongs to each stage (`self`): a second stage on the same rank has microbatches with the same numbers.
import torch
KEPT = {}
class GraphStage:
    def __init__(self, function):
        self.function = function
    def forward(self, i, x):
        if x is not None:
            x = x.detach().requires_grad_()
        y = self.function(i, x)
        KEPT[i] = x, torch.autograd.graph.get_gradient_edge(y)
        return y.detach()
    def backward(self, i, dy):
        x, edge = KEPT.pop(i)
        torch.autograd.backward(edge, dy)
        return None if x is None else x.grad
    def weights(self, i):
        pass


# %% empty
import torch
class GraphStage:
    def __init__(self, function): pass
    def forward(self, i, x): return torch.zeros(1)
    def backward(self, i, dy): return None
    def weights(self, i): pass
