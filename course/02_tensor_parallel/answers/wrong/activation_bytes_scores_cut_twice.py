# told: divided twice
def activation_bytes(s, b, h, a, t, sequence_parallel):
    scores = 5 * a * s * s * b / t
    if sequence_parallel:
        return 34 * s * b * h / t + scores / t
    return s * b * h * (10 + 24 / t) + scores
