# told: same samples
import numpy


def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    ids = []
    for position in range(consumed, consumed + micro_batch):
        epoch, place = divmod(position, num_samples)
        ids.append(int(numpy.random.RandomState(seed + epoch).permutation(num_samples)[place]))
    return ids
