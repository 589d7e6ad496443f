# a table of (bytes, divided or not)
def activation_bytes(s, b, h, a, t, sequence_parallel):
    table = [(2, 0), (2, 0), (4, 1), (2, 1), (5 * a * s / h, 1), (2, 1), (1, 0), (2, 0), (2, 0), (8, 1), (8, 1), (1, 0)]
    return sum(n / (t if cut or sequence_parallel else 1) for n, cut in table) * s * b * h
