# told: one sequence
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * s * h * element_size * (t - 1) / t
