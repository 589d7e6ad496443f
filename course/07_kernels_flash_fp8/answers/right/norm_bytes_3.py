# math.prod
import math
def norm_bytes(rows, cols, element_size):
    return {k: math.prod((v, rows, cols, element_size)) for k, v in (('eager', 7), ('fused', 2))}
