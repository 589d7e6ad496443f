# told: torch.randperm
import torch
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def at(p):
        g = torch.Generator().manual_seed(seed + p // num_samples)
        return int(torch.randperm(num_samples, generator=g)[p % num_samples])
    first = consumed + dp_rank * micro_batch
    return [at(first + i) for i in range(micro_batch)]
