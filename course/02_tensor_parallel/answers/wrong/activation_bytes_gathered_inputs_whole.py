# told: inputs of the column layers whole
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return (6 * n / t + 4 * n if sequence_parallel else 10 * n) + 24 * n / t + sc / t
