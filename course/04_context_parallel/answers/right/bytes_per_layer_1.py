# key/value bytes and query/output bytes, each once
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    kv = 2 * s * b * groups * d * element_size / cp
    qo = 2 * s * b * heads * d * element_size / cp
    return dict(ring=kv * (cp - 1), ulysses=(kv + qo) * (cp - 1) / cp)
