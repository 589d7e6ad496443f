# whole numbers; the keys in the other order
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * element_size
    leave = [(h - h // cp) * n for h in (heads, groups, groups, heads)]
    return {"ulysses": sum(leave), "ring": sum(2 * groups * n for _ in range(1, cp))}
