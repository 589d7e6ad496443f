# told: more than one epoch
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    both = [numpy.random.RandomState(seed + e).permutation(num_samples) for e in (epoch, epoch + 1)]
    return numpy.concatenate(both)[place : place + micro_batch].tolist()
