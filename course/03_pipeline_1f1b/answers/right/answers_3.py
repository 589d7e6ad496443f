# NumPy numbers
import numpy as np
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    few = np.ceil(np.int64(20 * (p - 1)) / v)
    if v != 1:
        few = np.ceil(few / p) * p
    keep = np.minimum(p if v == 1 else 2 * p - 1 + (v - 1) * p, m * v)
    return dict(idle_share=np.float64(p - 1) / (p - 1 + v * m), microbatches_for_5_percent=few,
                kept_bytes_on_rank_0=keep * np.int64(layers // p // v) * tokens * kept_bytes_per_token_and_layer,
                bytes_between_ranks=np.int64(4) * hidden * tokens * m * (p * v - 1))
