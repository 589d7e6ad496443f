# told: what the mask hides
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + s + 2*d*cols*sum((((i+1)*rows + cols - 1) // cols) for i in range(s // rows))
    return {'standard': (4*s*d + 2*s*(s+1)) * element_size, 'flash': flash * element_size}
