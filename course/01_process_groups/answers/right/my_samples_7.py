# recursion: what is left of this epoch, and then the same for the next one
import numpy as np


def take(place, epoch, how_many, num_samples, seed):
    if how_many == 0:
        return []
    order = np.random.RandomState(seed + epoch).permutation(num_samples)
    here = order[place : place + how_many].tolist()
    return here + take(0, epoch + 1, how_many - len(here), num_samples, seed)


def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    return take(place, epoch, micro_batch, num_samples, seed)
