# NumPy's global generator, seeded for each epoch; a torch tensor
import numpy as np
import torch
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first, out = consumed + dp_rank * micro_batch, []
    for e in range(first // num_samples, (first + micro_batch - 1) // num_samples + 1):
        np.random.seed(seed + e)
        order = np.random.permutation(num_samples)
        out.append(order[max(0, first - e * num_samples) : first + micro_batch - e * num_samples])
    return torch.from_numpy(np.concatenate(out))
