# told: by tokens than norms
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return (6 * n + 4 * n / (t if sequence_parallel else 1)) + 24 * n / t + sc / t
