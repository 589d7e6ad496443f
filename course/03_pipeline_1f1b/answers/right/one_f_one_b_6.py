# a NumPy array; what is missing is cut out at the end
import numpy as np
def one_f_one_b(rank, p, m):
    w = p - 1 - rank
    words = [word for k in range(m + w) for word in ((f"F{k}", k < m), (f"B{k - w}", k >= w))]
    return np.array([word for word, there in words if there], dtype=object)
