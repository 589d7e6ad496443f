# each position is looked up in a cached permutation; returns a tuple
import numpy, functools
@functools.lru_cache
def order(seed, n):
    return numpy.random.RandomState(seed).permutation(n)
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    at = [consumed + dp_rank * micro_batch + i for i in range(micro_batch)]
    return tuple(order(seed + p // num_samples, num_samples)[p % num_samples] for p in at)
