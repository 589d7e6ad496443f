# slices of one epoch after another
import numpy, torch
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    out = []
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    while len(out) < micro_batch:
        p = torch.from_numpy(numpy.random.RandomState(seed + epoch).permutation(num_samples))
        out += p[place : place + micro_batch - len(out)].tolist()
        epoch, place = epoch + 1, 0
    return out
