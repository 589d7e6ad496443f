# told: do not assume
def shares(outs, parts):
    return [[1.0] * len(parts) for _ in outs]
