# told: two column layers
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    payload = s * b * h * element_size * (t - 1) / t
    return (9 if sequence_parallel else 8) * payload
