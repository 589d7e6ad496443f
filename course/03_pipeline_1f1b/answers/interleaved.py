from labkit.answers import Edit, Same

_GROUPS = "first in range(0, m, p) for c in range(v) for i in range(first, first + p)"
_AHEAD = "min(len(table), 2 * (p - rank - 1) + (v - 1) * p)"

WRONG = [
    Edit("v - 1 - c", "c", mistake="The backward takes the chunks in the order of the forward here. A gradient comes out of the last chunk first."),
    Edit('"F{i}.{c}"', '"F{c}.{i}"', ("B{i}.{v - 1 - c}", "B{v - 1 - c}.{i}"), mistake="F2.1 is microbatch 2 in chunk 1. Here the chunk comes before the point and the microbatch behind it."),
    Edit(_GROUPS, "c in range(v) for i in range(m)", mistake="Here all m microbatches pass chunk 0 before the first of them passes chunk 1: the groups are too large."),
    Edit(_GROUPS, "i in range(m) for c in range(v)", mistake="Here a microbatch passes all chunks before the next one begins: the groups are too small."),
    Edit(_AHEAD, "len(table)", mistake="This is GPipe with chunks: all forwards come first."),
    Edit(_AHEAD, "p - rank - 1", mistake="On the last rank this warm-up ends before microbatch 0 has passed the last chunk, so no backward can begin."),
    Edit(_AHEAD, "min(len(table), 2 * (p - rank - 1))", mistake="On the last rank this warm-up ends before microbatch 0 has passed the last chunk, so no backward can begin."),
    Edit("2 * (p - rank - 1)", "2 * rank", mistake="The warm-up grows with the rank here. But rank 0 is the farthest from the last rank."),
    Edit("2 * (p - rank - 1)", "2 * (p - 1)", mistake="All ranks warm up with the same number of forwards here, though their distances to the last rank differ."),
    Edit("min(len(table), ", "min(m, ", mistake="The warm-up is cut off at m forwards here; a rank has m forwards in each of its chunks."),
    Edit(_GROUPS, "c in range(v) for i in range(m)", ("(v - 1) * p", "(v - 1) * m"), told="activations at a time"),
    Edit("+ (v - 1) * p", "+ (v - 1) * p + 1", told="activations at a time"),
    Edit("+ (v - 1) * p", "+ v * p", told="activations at a time"),
    Edit(_AHEAD, "max(0, 2 * (p - rank - 1) + (v - 1) * p - 1)", told="messages take time | are enough | before its own"),
    Edit("2 * (p - rank - 1)", "p - rank - 1", told="messages take time"),
    Edit(_AHEAD, "2 * (p - rank - 1) + (v - 1) * p", told="never does"),
    Edit("backward = [", "backward = [f\"B{i}.{c}\" for i, c in table[::-1]] or [", told="before its own F"),
    Edit("return todo + backward[len(table) - warmup :]", "return ' '.join(todo + backward[len(table) - warmup :])", told="returns one string"),
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
