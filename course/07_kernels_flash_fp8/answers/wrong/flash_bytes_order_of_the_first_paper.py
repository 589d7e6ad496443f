# told: the order of the first paper
def flash_bytes(s, d, rows, cols, element_size):
    n = 2 * s * d
    for b in range(0, s, cols):
        for a in range(0, s, rows):
            if a + rows - 1 >= b:
                n += 2 * rows * d + rows
    return {"standard": (4*s*d + 4*s*s)*element_size, "flash": n * element_size}
