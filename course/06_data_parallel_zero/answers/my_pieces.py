from labkit.answers import Edit, Same

_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"

WRONG = [
    Edit(
        "max(places[i], low), min(places[i] + numels[i], low + share)",
        "places[i], places[i] + numels[i] * (low <= places[i] < low + share)",
        told="several ranks",
    ),
    Edit("first - places[i], last - places[i]", "first, last", told="own elements"),
    Edit("n, first - low", "n, first", told="this rank's shard"),
    Edit("n, first - low", "n, first - start", told="of the bucket"),
    Edit("last - places[i], n", "last - first, n", told="not how long"),
    Edit("reversed(range(len(numels)))", "range(len(numels))"),
    Edit("return found", "return sorted(found)", told="order of the buffer"),
    Edit("start + rank * share", "start + (ranks - 1 - rank) * share", told="another rank's"),
    Edit("if first < last:", "if first < last and first == places[i]:", told="the rest is yours | several ranks"),
    Edit("first < last", "first <= last"),
]

RIGHT = [
    Edit(
        "found.append((i, first - places[i], last - places[i], n, first - low))",
        "found.append([i, first - places[i], last - places[i], n, first - low])",
    ),
    Edit("reversed(range(len(numels)))", "sorted(range(len(numels)), key=places.__getitem__)"),
    Edit("if first < last:", "if last - first > 0:"),
]

EQUIVALENT = [
    Same("line 7: `/` for `//`", _WHOLE),
    Same("line 7: rounded up for down", _WHOLE),
]


# %% wrong: order of the model
# told: the last parameter first
def my_pieces(numels, places, buckets, ranks, rank):
    out = []
    for n, (a, b) in enumerate(buckets):
        part = (b - a) // ranks
        lo = a + rank * part; hi = lo + part
        for i, p in enumerate(places):
            f, l = max(p, lo), min(p + numels[i], hi)
            if f < l: out.append((i, f - p, l - p, n, f - lo))
    return out
