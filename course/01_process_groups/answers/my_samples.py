from labkit.answers import Edit

WRONG = [
    Edit("seed + epoch", "seed", mistake="You read every epoch in the same order. Each has an order of its own, from a seed of its own."),
    Edit("divmod(position, num_samples)", "(first // num_samples, position % num_samples)", mistake="You give all samples of a rank the same epoch. A micro-batch can begin in one epoch and end in " "the next."),
    Edit(
        "first = consumed + dp_rank * micro_batch",
        "first = consumed + dp_rank",
        ("range(first, first + micro_batch)", "range(first, first + micro_batch * dp_size, dp_size)"),
        mistake="You deal the samples out one by one, in turn. Each rank takes a contiguous block.",
    ),
    # all ranks the same
    Edit(
        "    first = consumed + dp_rank * micro_batch\n",
        "",
        ("first, first", "consumed, consumed"),
        mistake="Every rank gets the same samples, those of rank 0.",
    ),
    # consumed of one rank
    Edit(
        "first = consumed + dp_rank * micro_batch",
        "first = consumed * dp_size + dp_rank * micro_batch",
        mistake="`consumed` counts the samples of the whole run already, not those of one rank.",
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
# mistake: You drop the samples at the end of an epoch that fill no batch. Every sample is read: a batch goes on in the next epoch.
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
# mistake: Your list ends with the epoch. The samples of the next epoch follow at once.
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    e, at = divmod(consumed, num_samples)
    order = numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    return order[at + dp_rank * micro_batch : at + (dp_rank + 1) * micro_batch]


# %% wrong: of all ranks
# mistake: These are the samples of all ranks. Asked are those of one.
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def at(p):
        return int(numpy.random.RandomState(seed + p // num_samples).permutation(num_samples)[p % num_samples])
    return [at(consumed + i) for i in range(micro_batch * dp_size)]


# %% wrong: one generator for all epochs
# mistake: Your later epochs come from the generator of the first. Each epoch has a seed of its own.
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    rng = numpy.random.RandomState(seed)
    stream = []
    while len(stream) < consumed + dp_size * micro_batch:
        stream += rng.permutation(num_samples).tolist()
    first = consumed + dp_rank * micro_batch
    return stream[first : first + micro_batch]


# %% wrong: order of torch
# mistake: Your orders come from another generator, `torch.randperm`. Asked are those of `numpy.random.RandomState`.
import torch
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    def at(p):
        g = torch.Generator().manual_seed(seed + p // num_samples)
        return int(torch.randperm(num_samples, generator=g)[p % num_samples])
    first = consumed + dp_rank * micro_batch
    return [at(first + i) for i in range(micro_batch)]


# %% wrong: own part of the data
# mistake: You give each rank a part of the data set for a whole epoch. All ranks read from one stream, a batch after the other.
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    e, at = divmod(consumed, num_samples)
    order = numpy.random.RandomState(seed + e).permutation(num_samples).tolist()
    share = num_samples // dp_size
    mine = order[dp_rank * share : (dp_rank + 1) * share]
    at //= dp_size
    return mine[at : at + micro_batch]


# %% wrong: places instead of samples
# mistake: These are places in the order of an epoch. Asked are the samples that stand there.
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    first = consumed + dp_rank * micro_batch
    return [(first + i) % num_samples for i in range(micro_batch)]


# %% wrong: two epochs at most
# mistake: You look at two epochs at most. With few samples a micro-batch holds the ends of more than one epoch.
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    both = [numpy.random.RandomState(seed + e).permutation(num_samples) for e in (epoch, epoch + 1)]
    return numpy.concatenate(both)[place : place + micro_batch].tolist()
