# reads and writes of every operation in lists
def norm_bytes(rows, cols, element_size):
    reads, writes = [1, 1, 1, 1], [1, 0, 1, 1]
    b = rows * cols * element_size
    return {'eager': float(b * (sum(reads) + sum(writes))), 'fused': float(2 * b)}
