# told: heads are divided
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    return n * 34 / t + 5 * a * s * s * b if sequence_parallel else n * (10 + 24 / t) + 5 * a * s * s * b
