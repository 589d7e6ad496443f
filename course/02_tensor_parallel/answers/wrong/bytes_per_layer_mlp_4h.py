# told: stay on their ranks
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    f = 4 + 16
    return (f if not sequence_parallel else f + 5) * n * (t - 1) / t
