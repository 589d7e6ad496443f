from labkit.answers import Edit, Same

_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"
_ORDER = "All pieces are right. They stand in the order of the buffer: bucket by bucket, the last parameter first."

WRONG = [
    Edit(
        "share = (stop - start) // ranks\n        low = start + rank * share", "share = buckets[-1][1] // ranks\n        low = rank * share",
        ("max(places[i], low)", "max(places[i], low, start)"), ("low + share)", "low + share, stop)"),
        mistake="Every *bucket* is cut among the ranks, not the buffer as a whole.",
    ),
    Edit("start + rank * share", "start + (ranks - 1 - rank) * share", mistake="Those are another rank's: rank 0 has the first part of each bucket."),
    Edit("if first < last:", "if first < last and first == places[i]:", mistake="Of a parameter that began in the part before, the rest is yours."),
    Edit(
        "max(places[i], low), min(places[i] + numels[i], low + share)",
        "places[i], places[i] + numels[i] * (low <= places[i] < low + share)",
        mistake="A parameter may lie in the parts of several ranks: each has a stretch of it.",
    ),
    Edit("first - places[i], last - places[i]", "first, last", mistake="Start and stop count the parameter's own elements, from 0; these are the buffer's."),
    Edit("n, first - low", "n, first", mistake="The last number counts from the beginning of this rank's shard; this one counts in the buffer."),
    Edit("n, first - low", "n, first - start", mistake="The last number counts from the beginning of this rank's shard; this one counts from that of the bucket."),
    Edit("last - places[i], n", "last - first, n", mistake="The third number is where the stretch stops, not how long it is."),
    Edit("reversed(range(len(numels)))", "range(len(numels))", mistake=_ORDER),
    Edit("return found", "return sorted(found)", mistake=_ORDER),
    Edit("first < last", "first <= last"),
]

RIGHT = [
    Edit("(i, first - places[i], last - places[i], n, first - low)", "[i, first - places[i], last - places[i], n, first - low]"),
    Edit("reversed(range(len(numels)))", "sorted(range(len(numels)), key=places.__getitem__)"),
    Edit("if first < last:", "if last - first > 0:"),
]

EQUIVALENT = [
    Same("line 7: `/` for `//`", _WHOLE),
    Same("line 7: rounded up for down", _WHOLE),
]
