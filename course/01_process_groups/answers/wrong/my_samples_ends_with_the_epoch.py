# told: ends with the epoch
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    e, at = divmod(consumed, num_samples)
    order = numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    return order[at + dp_rank * micro_batch : at + (dp_rank + 1) * micro_batch]
