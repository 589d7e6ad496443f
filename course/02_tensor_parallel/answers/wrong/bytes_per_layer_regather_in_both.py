# told: nothing is gathered again
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return 10 * n * (t - 1) / t
