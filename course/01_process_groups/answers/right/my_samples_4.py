# a NumPy array
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    at = consumed + dp_rank * micro_batch + numpy.arange(micro_batch)
    epochs = at // num_samples
    orders = {e: numpy.random.RandomState(seed + e).permutation(num_samples) for e in map(int, set(epochs.tolist()))}
    return numpy.array([orders[int(e)][int(p)] for e, p in zip(epochs, at % num_samples)])
