# told: input of a row layer is cut
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    sc = 5 * a * s * s * b
    return 12 * n / (t if sequence_parallel else 1) + 22 * n / t + sc / t
