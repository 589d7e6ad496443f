# message by message
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    at = dict(layout)
    found = dict.fromkeys(("tp", "cp", "pp", "ep", "dp"), 0)
    stream = 2 * tokens * model["h"]
    part = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}

    def send(axis, name, nbytes, ranks):
        found[axis] += part[name] * nbytes // ranks * (ranks - 1)

    pairs = 1 if model["topk"] else 2
    for _ in range(m):
        for _ in range(layers):
            for _ in range(pairs):
                for name in ("all_gather", "reduce_scatter", "all_gather", "reduce_scatter", "all_gather"):
                    send("tp", name, stream, at["tp"])
            for nbytes in (2, 2, 4):
                found["cp"] += (at["cp"] - 1) * nbytes * 2 * model["groups"] * model["d"] * tokens // at["tp"]
            for _ in range(4 if model["topk"] else 0):
                send("ep", "all_to_all", model["topk"] * stream // at["tp"], at["ep"])
        for chunk in range(at["v"]):
            if (rank, chunk) != (at["pp"] - 1, at["v"] - 1):
                found["pp"] += stream // at["tp"]
            if (rank, chunk) != (0, 0):
                found["pp"] += stream // at["tp"]
    kinds = (dense, at["dp"] * at["cp"]), (experts, at["tp"] * at["cp"] * at["dp"] // at["ep"])
    for n, ranks in kinds:
        if at["zero"] == 0:
            send("dp", "all_reduce", 4 * n, ranks)
        for _ in range(m if at["zero"] == 3 else at["zero"]):
            send("dp", "reduce_scatter", 4 * n, ranks)
            send("dp", "all_gather", 2 * n, ranks)
            if at["zero"] == 3:
                send("dp", "all_gather", 2 * n, ranks)
    return found
