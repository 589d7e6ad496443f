# told: behind the sum
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 8 * n / (t if sequence_parallel else 1) + 26 * n / t + sc / t
