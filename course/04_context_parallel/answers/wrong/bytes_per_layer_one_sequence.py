# told: for one sequence
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}
