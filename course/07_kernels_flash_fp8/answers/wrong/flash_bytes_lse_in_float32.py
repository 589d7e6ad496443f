# told: Each number of lse
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + 4*s/element_size + 2*d*cols*sum((((i+1)*rows + cols - 1) // cols) for i in range(s // rows))
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}
