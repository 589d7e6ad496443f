# the visible blocks by ceil
import math
def flash_bytes(s, d, rows, cols, element_size):
    blocks = sum(math.ceil((i + 1) * rows / cols) for i in range(s // rows))
    return {'standard': 4 * s * (s + d) * element_size, 'flash': (s * (2 * d + 1) + 2 * d * cols * blocks) * element_size}
