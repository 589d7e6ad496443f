# told: half of all keys
def flash_bytes(s, d, rows, cols, element_size):
    flash = 2*s*d + s + 2*d*s*(s//rows)//2
    return {'standard': (4*s*d + 4*s*s) * element_size, 'flash': flash * element_size}
