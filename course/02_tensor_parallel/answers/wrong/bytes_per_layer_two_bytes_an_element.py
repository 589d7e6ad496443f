# told: whatever `element_size` says
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    return (10 if sequence_parallel else 8) * s * b * h * 2 * (t - 1) / t
