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
