from labkit.answers import Edit, Same

WRONG = [
    Edit("v - 1 - c", "c", mistake="The backward takes the chunks in the order of the forward here. A gradient comes out of the last" " chunk first."),
    Edit("2 * (p - rank - 1) + (v - 1) * p", "p - rank - 1", mistake="On the last rank this warm-up ends before microbatch 0 has passed the last chunk, so no backward" " can begin."),
    Edit("2 * (p - rank - 1) + (v - 1) * p", "2 * (p - rank - 1)", mistake="On the last rank this warm-up ends before microbatch 0 has passed the last chunk, so no backward" " can begin."),
    Edit("2 * (p - rank - 1) + (v - 1) * p", "len(table)", mistake="This is GPipe with chunks: all forwards come first."),
    Edit("2 * (p - rank - 1)", "2 * rank", mistake="The warm-up grows with the rank here. But rank 0 is the farthest from the last rank."),
    Edit("2 * (p - rank - 1)", "2 * (p - rank)", mistake="Each rank warms up with two forwards more than asked."),
    Edit("(v - 1) * p", "v * p", mistake="Each rank warms up with a whole group of p forwards more than asked."),
    Edit("(v - 1) * p", "(v - 1) * m", mistake="The warm-up grows with m here: it takes whole batches through the first chunks in place of one " "group."),
    Edit("min(len(table), ", "min(m, ", mistake="The warm-up is cut off at m forwards here; a rank has m forwards in each of its chunks."),
    Edit(
        "return todo + backward[len(table) - warmup :]",
        "return ' '.join(todo + backward[len(table) - warmup :])",
        told="returns one string",
    ),
    # factor on the first rank only
    Edit("len(table), 2", "len(table), (2 if rank == 0 else 1)", told="messages take time"),
    # groups of all
    Edit(
        "first in range(0, m, p) for c in range(v) for i in range(first, first + p)",
        "c in range(v) for i in range(m)",
        ("2 * (p - rank - 1) + (v - 1) * p", "2 * (p - rank - 1) + (v - 1) * m"),
        told="activations at a time",
    ),
    # one forward less
    Edit(
        "2 * (p - rank - 1) + (v - 1) * p",
        "max(0, 2 * (p - rank - 1) + (v - 1) * p - 1)",
        told="messages take time | are enough | before its own",
    ),
    # one forward more
    Edit("2 * (p - rank - 1) + (v - 1) * p", "2 * (p - rank - 1) + (v - 1) * p + 1", told="activations at a time"),
    # two chunks at most
    Edit(
        "2 * (p - rank - 1) + (v - 1) * p",
        "2 * (p - rank - 1) + p",
        told="deadlock | waits for | before its own | are enough | activations",
    ),
    # warm up without the factor
    Edit("2 * (p - rank - 1)", "p - rank - 1", told="messages take time"),
    # warm up without the factor and the minimum
    Edit("min(len(table), 2 * (p - rank - 1) + (v - 1) * p)", "p - rank - 1 + (v - 1) * p", told="messages take time"),
    # warm up without the minimum
    Edit("min(len(table), 2 * (p - rank - 1) + (v - 1) * p)", "2 * (p - rank - 1) + (v - 1) * p", told="never does"),
]

RIGHT = [
    Edit("return todo + backward[len(table) - warmup :]", "return iter(todo + backward[len(table) - warmup :])"),
]

EQUIVALENT = [
    Same("line 3: range's `m` - 1", "m is a multiple of p > 1: the groups begin at the same places"),
]


# %% right: F and B of every slot by one function; one forward more in the warm-up
def interleaved(rank, p, m, v):
    def slot(k, back):
        group, at = divmod(k, p * v)
        chunk, i = divmod(at, p)
        chunk = v - 1 - chunk if back else chunk
        return f"{'B' if back else 'F'}{group * p + i}.{chunk}"
    w = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    todo = [slot(k, False) for k in range(w)]
    for k in range(m * v):
        if w + k < m * v:
            todo.append(slot(w + k, False))
        todo.append(slot(k, True))
    return todo


# %% right: a generator over slots
def interleaved(rank, p, m, v):
    n = m * v
    def slot(k):
        group, rest = divmod(k, p * v)
        return group * p + rest % p, rest // p
    ahead = min(n, 2 * (p - 1 - rank) + p * (v - 1))
    for k in range(n + ahead):
        if k < n:
            i, c = slot(k)
            yield f"F{i}.{c}"
        if k >= ahead:
            i, c = slot(k - ahead)
            yield f"B{i}.{v - 1 - c}"


# %% right: NumPy: the table as an array, transposed; a tuple
import numpy
def interleaved(rank, p, m, v):
    i = numpy.arange(m).reshape(-1, 1, p).repeat(v, axis=1).ravel()
    c = numpy.tile(numpy.arange(v).repeat(p), m // p)
    w = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
    words = []
    for k in range(m * v + w):
        words += [f"F{i[k]}.{c[k]}"] if k < m * v else []
        words += [f"B{i[k - w]}.{v - 1 - c[k - w]}"] if k >= w else []
    return tuple(words)


# %% right: counting what is under way
def interleaved(rank, p, m, v):
    table = [(i + j, c) for i in range(0, m, p) for c in range(v) for j in range(p)]
    room, f, b, words = 2 * (p - rank - 1) + (v - 1) * p + 1, 0, 0, ""
    while b < len(table):
        if f < len(table) and f - b < room:
            words += "F{}.{} ".format(*table[f])
            f += 1
        else:
            i, c = table[b]
            words += f"B{i}.{v - 1 - c} "
            b += 1
    return words.split()


# %% wrong: chunk before the point
# mistake: F2.1 is microbatch 2 in chunk 1. Here the chunk comes before the point and the microbatch behind it.
def interleaved(rank, p, m, v):
    table = [(g + i, c) for g in range(0, m, p) for c in range(v) for i in range(p)]
    forward = [f"F{c}.{i}" for i, c in table]
    backward = [f"B{v - 1 - c}.{i}" for i, c in table]
    ahead = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = forward[:ahead]
    for k in range(len(table) - ahead):
        todo += [forward[ahead + k], backward[k]]
    return todo + backward[len(table) - ahead :]


# %% wrong: groups of one
# mistake: Here a microbatch passes all chunks before the next one begins: the groups are too small.
def interleaved(rank, p, m, v):
    """A microbatch passes all chunks, then the next one."""
    table = [(i, c) for i in range(m) for c in range(v)]
    forward = [f"F{i}.{c}" for i, c in table]
    backward = [f"B{i}.{v - 1 - c}" for i, c in table]
    ahead = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = forward[:ahead]
    for k in range(len(table) - ahead):
        todo += [forward[ahead + k], backward[k]]
    return todo + backward[len(table) - ahead :]


# %% wrong: all forwards first
# told: activations at a time
def interleaved(rank, p, m, v):
    back = [f'B{i}.{v - 1 - c}' for c in range(v) for i in range(m)]
    return [f'F{i}.{c}' for c in range(v) for i in range(m)] + back


# %% wrong: backward table reversed
# told: before its own F
def interleaved(rank, p, m, v):
    table = [(i, c) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    back = table[::-1]
    n = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = [f"F{i}.{c}" for i, c in table[:n]]
    for (fi, fc), (bi, bc) in zip(table[n:], back):
        todo += [f"F{fi}.{fc}", f"B{bi}.{bc}"]
    return todo + [f"B{i}.{c}" for i, c in back[len(table) - n :]]


