from labkit.answers import Edit

_END = "i * s + s + 1, []"

WRONG = [
    Edit(_END, "i * s + s, []", mistake="A sample has s inputs and one label more: s + 1 tokens."),
    Edit("first, end, found = i * s, " + _END, "first, end, found = i * (s + 1), (i + 1) * (s + 1), []", mistake="Neighbours share a token: sample i begins at token i · s."),
    Edit("min(end, stop) - start]", "min(end, stop) - start - 1]", mistake="`last` is not included: it is the place behind the last token."),
    Edit("found.append([document, max(first, start) - start, min(end, stop) - start])", "found.append([document, max(first, start), min(end, stop)])", mistake="Places are counted in the document, from 0, not in the stream."),
    Edit("if max(first, start) < min(end, stop):", "if max(first, start) <= min(end, stop):", mistake="An empty document, or one that the sample only touches, has no piece."),
    Edit("if max(first, start) < min(end, stop):", "if start >= first and stop <= end:", mistake="A document that begins before the sample, or ends behind it, has a piece, too."),
    Edit("max(first, start) - start", "0", mistake="The first piece begins in the middle of its document, where the sample begins."),
    Edit("found.append([document, ", "found.append([len(found), ", mistake="`document` is its number in the whole stream."),
    Edit("min(end, stop) - start]", "min(end, stop) - max(first, start)]", mistake="`last` is a place, not a length."),
    Edit("    return found", "    return found[:1]", mistake="A sample may reach into several documents."),
]



# %% right: walk until the sample is full
def pieces(lengths, s, i):
    skip, want, found = i * s, s + 1, []
    for document, n in enumerate(lengths):
        if skip >= n:
            skip -= n
            continue
        take = min(want, n - skip)
        found.append([document, skip, skip + take])
        want, skip = want - take, 0
        if want == 0:
            break
    return found


# %% right: binary search
import bisect
import itertools


def pieces(lengths, s, i):
    ends = list(itertools.accumulate(lengths))
    at, last, found = i * s, i * s + s, []
    while at <= last:
        document = bisect.bisect_right(ends, at)
        start = ends[document] - lengths[document]
        stop = min(last + 1, ends[document])
        found.append([document, at - start, stop - start])
        at = stop
    return found


# %% right: numpy
import numpy as np


def pieces(lengths, s, i):
    stops = np.cumsum(lengths)
    starts = stops - np.asarray(lengths)
    low, high = np.maximum(starts, i * s), np.minimum(stops, (i + 1) * s + 1)
    return [[int(d), int(low[d] - starts[d]), int(high[d] - starts[d])] for d in np.flatnonzero(low < high)]


# %% wrong: the stream is built
# told: Do not build the stream
import numpy as np


def pieces(lengths, s, i):
    owner = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    found = []
    for at in range(i * s, i * s + s + 1):
        document = int(owner[at])
        place = at - int(begins[document])
        if found and found[-1][0] == document:
            found[-1][2] = place + 1
        else:
            found.append([document, place, place + 1])
    return found
