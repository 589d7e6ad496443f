# told: *first* query
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + s + 2*d*cols*sum(i*rows // cols + 1 for i in range(s // rows))
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}
