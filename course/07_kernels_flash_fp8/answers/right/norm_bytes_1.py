# 2 and 7 passes over the tensor
def norm_bytes(rows, cols, element_size):
    n = rows * cols
    return dict(fused=n * element_size * 2, eager=n * 7 * element_size)
