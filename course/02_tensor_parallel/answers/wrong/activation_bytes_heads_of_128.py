# told: heads of 128 features
def activation_bytes(s, b, h, a, t, sequence_parallel):
    whole, divided = 10 * s * b * h, (24 * h + 5 * (h / 128) * s) * s * b
    return (whole + divided) / t if sequence_parallel else whole + divided / t
