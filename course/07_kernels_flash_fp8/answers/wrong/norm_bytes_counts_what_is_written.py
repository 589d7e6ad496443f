# told: also *reads*
def norm_bytes(rows, cols, element_size):
    t = rows * cols * element_size
    return {'eager': 3*t, 'fused': t}
