# told: C-th of what
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * n * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1),
    }
