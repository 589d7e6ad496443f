# told: what all ranks send together
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    number = s * b * d * element_size
    return {"ring": (cp - 1) * 2 * groups * number, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * number}
