from labkit.answers import Edit

_BLOCK = "range(first, first + micro_batch)"
_ORDER = "numpy.random.RandomState(seed + epoch).permutation(num_samples)"

WRONG = [
    Edit(f"int({_ORDER}[place])", "place",
         mistake="These are places in the order of an epoch. Asked are the samples that stand there."),
    Edit("RandomState", "default_rng",
         mistake="Your orders come from another generator, `default_rng`. Asked are those of "
                 "`numpy.random.RandomState`."),
    Edit("import numpy", "import torch", (_ORDER,
         "torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))"),
         mistake="Your orders come from another generator, `torch.randperm`. Asked are those of "
                 "`numpy.random.RandomState`."),
    Edit("consumed + dp_rank * micro_batch", "consumed", mistake="Every rank gets the same samples, those of rank 0."),
    Edit(_BLOCK, "range(consumed, consumed + micro_batch * dp_size)",
         mistake="These are the samples of all ranks. Asked are those of one."),
    Edit("= consumed +", "= consumed * dp_size +",
         mistake="`consumed` counts the samples of the whole run already, not those of one rank."),
    Edit("seed + epoch", "seed",
         mistake="You read every epoch in the same order. Each has an order of its own, from a seed of its own."),
    Edit(
        "        ids.append",
        "        later = numpy.random.RandomState(seed)\n        orders = [later.permutation(num_samples) for _ in "
        "range(epoch + 1)]\n        ids.append",
        (_ORDER, "orders[epoch]"),
        mistake="Your later epochs come from the generator of the first. Each epoch has a seed of its own.",
    ),
    Edit("consumed + dp_rank * micro_batch", "consumed + dp_rank", (_BLOCK,
         "range(first, first + micro_batch * dp_size, dp_size)"),
         mistake="You deal the samples out one by one, in turn. Each rank takes a contiguous block."),
    Edit(_BLOCK, "range(first, min(first + micro_batch, (consumed // num_samples + 1) * num_samples))",
         mistake="Your list ends with the epoch. The samples of the next epoch follow at once."),
    Edit("divmod(position, num_samples)", "(first // num_samples, position % num_samples)",
         mistake="You give all samples of a rank the same epoch. A micro-batch can begin in one epoch and end in the "
                 "next."),
    Edit("divmod(position, num_samples)", "(consumed // num_samples, position % num_samples)",
         mistake="You take the epoch in which the batch begins. This rank's part may be in the next one."),
    Edit(
        "(position, num_samples)", "(position, max(num_samples - num_samples % (micro_batch * dp_size), 1))",
        mistake="You drop the samples at the end of an epoch that fill no batch. Every sample is read: a batch goes on "
                "in the next epoch.",
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


# %% wrong: two epochs at most
# mistake: You look at two epochs at most. With few samples a micro-batch holds the ends of more than one epoch.
import numpy
def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    both = [numpy.random.RandomState(seed + e).permutation(num_samples) for e in (epoch, epoch + 1)]
    return numpy.concatenate(both)[place : place + micro_batch].tolist()
