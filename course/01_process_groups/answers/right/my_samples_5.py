# a generator
from itertools import count, islice
from numpy.random import RandomState
def stream(num_samples, seed):
    for epoch in count():
        yield from RandomState(seed + epoch).permutation(num_samples)
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first = consumed + micro_batch * dp_rank
    return islice(stream(num_samples, seed), first, first + micro_batch)
