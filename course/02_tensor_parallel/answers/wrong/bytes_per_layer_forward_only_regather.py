# told: This is the forward pass
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (4 if not sequence_parallel else 6) * n * (t - 1) / t
