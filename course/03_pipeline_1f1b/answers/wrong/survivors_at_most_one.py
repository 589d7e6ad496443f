# told: equals no single gradient
import torch
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if torch.allclose(g, got)]
