# told: whole run
import numpy


def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first = consumed * dp_size + dp_rank * micro_batch
    ids = []
    for position in range(first, first + micro_batch):
        epoch, place = divmod(position, num_samples)
        ids.append(int(numpy.random.RandomState(seed + epoch).permutation(num_samples)[place]))
    return ids
