# summed over steps and over tensors
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    ring = sum(2 * n * b * groups * d * element_size for _ in range(cp - 1))
    q = n * b * heads * d * element_size
    kv = n * b * groups * d * element_size
    return {'ring': ring, 'ulysses': sum(x - x / cp for x in (q, kv, kv, q))}
