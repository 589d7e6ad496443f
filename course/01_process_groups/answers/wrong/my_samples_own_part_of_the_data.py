# told: part of the data set
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    e, at = divmod(consumed, num_samples)
    order = numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    share = num_samples // dp_size
    mine = order[dp_rank * share : (dp_rank + 1) * share]
    at //= dp_size
    return mine[at : at + micro_batch]
