# told: Test every block
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    return [(rank + 1 - i) % len(ks) for i in range(len(ks))]
