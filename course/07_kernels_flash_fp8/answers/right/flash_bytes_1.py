# block by block of the mask
def flash_bytes(s, d, rows, cols, element_size):
    kv = 0
    for i in range(s // rows):
        for j in range(s // cols):
            if j * cols <= (i + 1) * rows - 1:
                kv += 2 * cols * d
    return dict(standard=(s * d * 2 + s * s + s * s * 2 + s * s + s * d * 2) * element_size, flash=element_size * (kv + s * d * 2 + s))
