# told: twice the products
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (12 if not sequence_parallel else 14) * n * (t - 1) / t
