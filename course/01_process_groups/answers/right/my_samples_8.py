import itertools
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def stream():
        for e in itertools.count(consumed // num_samples):
            yield from numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    rest = itertools.islice(stream(), consumed % num_samples, None)
    blocks = [list(itertools.islice(rest, micro_batch)) for _ in range(dp_size)]
    return blocks[dp_rank]
