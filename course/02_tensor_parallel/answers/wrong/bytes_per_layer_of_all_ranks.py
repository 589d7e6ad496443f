# told: all t ranks send
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (8 if not sequence_parallel else 10) * n * (t - 1)
