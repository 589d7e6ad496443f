# all epochs up to the last sample are concatenated, then cut
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    last = consumed + dp_size * micro_batch
    stream = numpy.concatenate([numpy.random.RandomState(seed + e).permutation(num_samples) for e in range(last // num_samples + 1)])
    return stream[consumed:last].reshape(dp_size, micro_batch)[dp_rank].tolist()
