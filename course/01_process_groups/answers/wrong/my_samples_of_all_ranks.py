# told: samples of all ranks
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def at(p):
        return int(numpy.random.RandomState(seed + p // num_samples).permutation(num_samples)[p % num_samples])
    return [at(consumed + i) for i in range(micro_batch * dp_size)]
