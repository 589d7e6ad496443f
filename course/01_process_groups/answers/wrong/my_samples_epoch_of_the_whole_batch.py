# told: the epoch in which the batch begins | the same epoch
# the epoch in which the batch of all ranks begins
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed, num_samples)
    both = [numpy.random.RandomState(seed + epoch).permutation(num_samples) for _ in range(2)]
    first = place + dp_rank * micro_batch
    return [int(both[0][(first + i) % num_samples]) for i in range(micro_batch)]
