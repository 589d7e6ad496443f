# told: not always 2
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * 2
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}
