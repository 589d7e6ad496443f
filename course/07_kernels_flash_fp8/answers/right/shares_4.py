# gradient-free: einsum and a Gram matrix, rows as tuples
import torch


def shares(outs, parts):
    P, O = torch.stack(parts).double().flatten(1), torch.stack(outs).double().flatten(1)
    gram = torch.einsum("ik,jk->ij", P, P)
    return tuple(map(tuple, torch.linalg.inv(gram).matmul(P @ O.T).T.tolist()))
