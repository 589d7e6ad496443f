# told: fill no batch
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    batch = micro_batch * dp_size
    usable = max(num_samples // batch * batch, 1)
    first = consumed + dp_rank * micro_batch
    return [
        int(numpy.random.RandomState(seed + p // usable).permutation(num_samples)[p % usable % num_samples])
        for p in range(first, first + micro_batch)
    ]
