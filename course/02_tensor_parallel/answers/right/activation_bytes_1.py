# the two formulas of the paper
def activation_bytes(s, b, h, a, t, sequence_parallel):
    if sequence_parallel:
        return s * b * h * (34 + 5 * a * s / h) / t
    return s * b * h * (10 + 24 / t + 5 * a * s / h / t)
