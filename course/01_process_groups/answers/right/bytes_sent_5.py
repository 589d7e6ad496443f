# a tensor of no dimensions
import torch
def bytes_sent(op, nbytes, ranks):
    steps = {"all_reduce": 2 * ranks - 2, "all_gather": ranks - 1, "reduce_scatter": ranks - 1}[op]
    return torch.tensor(nbytes, dtype=torch.float64) * steps / ranks
