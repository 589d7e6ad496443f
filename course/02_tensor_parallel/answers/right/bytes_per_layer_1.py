# one factor: 8 or 10 times (t-1)/t of the tensor
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    return (10 if sequence_parallel else 8) * (n - n / t)
