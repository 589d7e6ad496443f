# told: *should* be used
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    return [(rank - i) % len(ks) for i in range(len(ks))]
