# told: closed in this exercise
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    from minimegatron.planner.closed_forms import tensor_parallel_volume

    tp = 2 * m * layers * tensor_parallel_volume(tokens, 1, model["h"], layout["tp"], True)
    return {"tp": tp, "cp": 0, "pp": 0, "ep": 0, "dp": 0}
