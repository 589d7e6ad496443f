# told: is per s b h, too
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 10 * n / (t if sequence_parallel else 1) + 24 * n / t + 5 * a * s / h / t
