# told: the wrong way round
def activation_bytes(s, b, h, a, t, sequence_parallel):
    whole, divided = 10 * s * b * h, (24 * h + 5 * a * s) * s * b
    return whole + divided / t if sequence_parallel else (whole + divided) / t
