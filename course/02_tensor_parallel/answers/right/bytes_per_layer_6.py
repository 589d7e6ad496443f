# message by message
def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):
    sent = 0.0
    for _pair in ("attention", "mlp"):
        for _direction in ("forward", "backward"):
            kinds = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
            kinds += ["all_gather"] * (sequence_parallel and _direction == "backward")
            sent += sum((2 if kind == "all_reduce" else 1) * s * b * h * element_size * (t - 1) / t for kind in kinds)
    return sent
