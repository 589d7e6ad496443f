# told: You count one sequence
def activation_bytes(s, b, h, a, t, sequence_parallel):
    whole, divided = 10 * s * h, (24 * h + 5 * a * s) * s
    return (whole + divided) / t if sequence_parallel else whole + divided / t
