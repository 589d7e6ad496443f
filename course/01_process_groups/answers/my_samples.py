from labkit.answers import Edit

WRONG = [
    Edit("seed + epoch", "seed", told="order of its own"),
    Edit("divmod(position, num_samples)", "(first // num_samples, position % num_samples)", told="the same epoch"),
    Edit(
        "first = consumed + dp_rank * micro_batch",
        "first = consumed + dp_rank",
        ("range(first, first + micro_batch)", "range(first, first + micro_batch * dp_size, dp_size)"),
        told="contiguous block",
    ),
    # all ranks the same
    Edit(
        "    first = consumed + dp_rank * micro_batch\n",
        "",
        ("first, first", "consumed, consumed"),
        told="same samples",
    ),
    # consumed of one rank
    Edit(
        "first = consumed + dp_rank * micro_batch",
        "first = consumed * dp_size + dp_rank * micro_batch",
        told="whole run",
    ),
]


# %% right: each position is looked up in a cached permutation; returns a tuple
import numpy, functools
@functools.lru_cache
def order(seed, n):
    return numpy.random.RandomState(seed).permutation(n)
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    at = [consumed + dp_rank * micro_batch + i for i in range(micro_batch)]
    return tuple(order(seed + p // num_samples, num_samples)[p % num_samples] for p in at)


# %% right: slices of one epoch after another
import numpy, torch
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    out = []
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    while len(out) < micro_batch:
        p = torch.from_numpy(numpy.random.RandomState(seed + epoch).permutation(num_samples))
        out += p[place : place + micro_batch - len(out)].tolist()
        epoch, place = epoch + 1, 0
    return out


# %% right: a NumPy array
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    at = consumed + dp_rank * micro_batch + numpy.arange(micro_batch)
    epochs = at // num_samples
    orders = {e: numpy.random.RandomState(seed + e).permutation(num_samples) for e in map(int, set(epochs.tolist()))}
    return numpy.array([orders[int(e)][int(p)] for e, p in zip(epochs, at % num_samples)])


# %% right: a generator
from itertools import count, islice
from numpy.random import RandomState
def stream(num_samples, seed):
    for epoch in count():
        yield from RandomState(seed + epoch).permutation(num_samples)
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first = consumed + micro_batch * dp_rank
    return islice(stream(num_samples, seed), first, first + micro_batch)


# %% right: recursion: what is left of this epoch, and then the same for the next one
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


# %% right: a stream of epochs, cut by islice
import itertools
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def stream():
        for e in itertools.count(consumed // num_samples):
            yield from numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    rest = itertools.islice(stream(), consumed % num_samples, None)
    blocks = [list(itertools.islice(rest, micro_batch)) for _ in range(dp_size)]
    return blocks[dp_rank]


# %% wrong: drops the end of an epoch
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


# %% wrong: ends with the epoch
# told: ends with the epoch
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    e, at = divmod(consumed, num_samples)
    order = numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    return order[at + dp_rank * micro_batch : at + (dp_rank + 1) * micro_batch]


# %% wrong: epoch of the whole batch
# told: the epoch in which the batch begins | the same epoch
# the epoch in which the batch of all ranks begins
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed, num_samples)
    both = [numpy.random.RandomState(seed + epoch).permutation(num_samples) for _ in range(2)]
    first = place + dp_rank * micro_batch
    return [int(both[0][(first + i) % num_samples]) for i in range(micro_batch)]


# %% wrong: of all ranks
# told: samples of all ranks
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def at(p):
        return int(numpy.random.RandomState(seed + p // num_samples).permutation(num_samples)[p % num_samples])
    return [at(consumed + i) for i in range(micro_batch * dp_size)]


# %% wrong: one generator for all epochs
# told: generator of the first
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    rng = numpy.random.RandomState(seed)
    stream = []
    while len(stream) < consumed + dp_size * micro_batch:
        stream += rng.permutation(num_samples).tolist()
    first = consumed + dp_rank * micro_batch
    return stream[first : first + micro_batch]


# %% wrong: order of torch
# told: torch.randperm
import torch
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def at(p):
        g = torch.Generator().manual_seed(seed + p // num_samples)
        return int(torch.randperm(num_samples, generator=g)[p % num_samples])
    first = consumed + dp_rank * micro_batch
    return [at(first + i) for i in range(micro_batch)]


# %% wrong: own part of the data
# told: part of the data set
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    e, at = divmod(consumed, num_samples)
    order = numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    share = num_samples // dp_size
    mine = order[dp_rank * share : (dp_rank + 1) * share]
    at //= dp_size
    return mine[at : at + micro_batch]


# %% wrong: places instead of samples
# told: places in the order
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first = consumed + dp_rank * micro_batch
    return [(first + i) % num_samples for i in range(micro_batch)]


# %% wrong: two epochs at most
# told: more than one epoch
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    both = [numpy.random.RandomState(seed + e).permutation(num_samples) for e in (epoch, epoch + 1)]
    return numpy.concatenate(both)[place : place + micro_batch].tolist()
