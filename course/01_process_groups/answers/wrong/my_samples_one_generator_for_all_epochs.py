# told: generator of the first
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    rng = numpy.random.RandomState(seed)
    stream = []
    while len(stream) < consumed + dp_size * micro_batch:
        stream += rng.permutation(num_samples).tolist()
    first = consumed + dp_rank * micro_batch
    return stream[first : first + micro_batch]
