# told: places in the order
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first = consumed + dp_rank * micro_batch
    return [(first + i) % num_samples for i in range(micro_batch)]
