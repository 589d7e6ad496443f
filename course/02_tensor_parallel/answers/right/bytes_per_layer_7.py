# messages by their names, counted
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    n = s * b * h * element_size
    cost = {"ar": 2, "ag": 1, "rs": 1}
    pair = ["ag", "rs", "ag", "rs", "ag"] if sequence_parallel else ["ar", "ar"]
    return sum(cost[k] * n * (t - 1) / t for k in pair * 2)
