# told: Nothing is rounded
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * (s * b * h * element_size // t) * (t - 1)
