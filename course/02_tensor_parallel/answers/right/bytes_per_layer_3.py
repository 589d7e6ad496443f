# step by step of each ring
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    part = s * b * h * element_size / t
    steps = t - 1
    total = 0
    for pair in ('attention', 'mlp'):
        for way in ('forward', 'backward'):
            total += 2 * steps * part
        total += steps * part if sequence_parallel else 0
    return total
