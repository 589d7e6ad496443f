# a torch tensor of indices
import torch
def survivors(got, grads):
    a = torch.stack(list(grads)).flatten(1).T.double()
    w = torch.linalg.pinv(a) @ got.flatten().double()
    return (w.round() == 1).nonzero().squeeze(1)
