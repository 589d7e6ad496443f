# what is whole and what is cut, tensor by tensor
def activation_bytes(s, b, h, a, t, sequence_parallel):
    n = s * b * h
    whole = 4 * 2 * n + 2 * n
    cut = (4 + 2 + 2 + 8 + 8) * n + (2 + 1 + 2) * a * s * s * b
    return cut / t + whole / (t if sequence_parallel else 1)
