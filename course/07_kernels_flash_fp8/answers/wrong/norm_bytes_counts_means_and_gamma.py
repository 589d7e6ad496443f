# told: Count tensors of the full size only
def norm_bytes(rows, cols, element_size):
    e = 2*rows*cols + rows*cols + rows + 2*rows + 2*rows + 2*rows*cols + rows + 2*rows*cols + cols
    return {'eager': e*element_size, 'fused': (2*rows*cols+cols)*element_size}
