# told: of one rank's part
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    whole, part = n * (t - 1) / t, n / t * (t - 1) / t
    return 8 * whole + (2 * part if sequence_parallel else 0)
