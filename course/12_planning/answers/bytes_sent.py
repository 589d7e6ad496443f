from labkit.answers import Edit, Same

_SENDS = 'm * (2 * layout["v"] - (rank == 0) - (rank == pp - 1))'
_CP, _ZERO_3 = "(cp - 1) * (2 + 2 + 4) * numbers", "3: m * (2 + 2 + 4)"

WRONG = [
    Edit("* ring(stream, tp)", "* stream * (tp > 1)", mistake="tp: in a ring of n ranks a rank sends (n - 1)/n of a payload."),
    Edit("(5 if topk else 10)", "(4 if topk else 8)", mistake="tp: the backward pass of the first matrix of a pair gathers its input once more."),
    Edit("(5 if topk else 10)", "10", mistake="tp: a layer with experts has one pair of matrices that tp cuts, attention's."),
    Edit(_CP, "(cp - 1) * 2 * numbers", mistake="cp: the backward pass is missing: keys and values come by once more, and their gradients with them, in fp32."),
    Edit("sends * stream // tp", "sends * stream", mistake="pp: the message between stages is cut over tp, as with sequence parallelism all of the stream is."),
    Edit(_SENDS, 'm * 2 * layout["v"] if pp > 1 else 0', mistake="pp: the last stage has no next one, and the first has none before it."),
    Edit(_SENDS, "m * (2 - (rank == 0) - (rank == pp - 1))", mistake="pp: a rank sends what each of its v chunks computes."),
    Edit(_SENDS, 'm * layout["v"] * (2 - (rank == 0) - (rank == pp - 1))', mistake="pp: of the chunks of the last rank only its last one ends the model, and of those of the first rank only its first one begins it."),
    Edit("many * 4 * ring", "many * 2 * ring", mistake="ep: rows go there and back, and so do their gradients."),
    Edit("ring(dense, dp * cp)", "ring(dense, dp)", mistake="dp: ranks of cp have the same dense parameters, so their gradients are summed over dp * cp ranks."),
    Edit("ring(experts, expert_dp)", "ring(experts, dp * cp)", mistake="dp: the ranks that hold the same experts are not those of dp * cp."),
    Edit(_ZERO_3, "3: 2 + 2 + 4", mistake="dp: ZeRO-3 gathers the weights for every microbatch anew."),
    Edit("payload * (ranks - 1) // ranks", "payload * (ranks - 1)"),
    Edit(_CP, "(cp - 1) * (2 + 2 + 2) * numbers"),
    Edit("ring(topk * stream // tp, ep)", "ring(topk * stream, ep)", mistake="ep: with sequence parallelism each rank of tp has its own tokens, and sends no others."),
    Edit(_CP, "(2 + 2 + 4) * ring(numbers, cp)", mistake="cp: the ring passes on each of the other ranks' keys and values whole: cp - 1 times, and no (n - 1)/n of one."),
    Edit("tokens // tp\n    sends", "tokens\n    sends", mistake="cp: tp cuts the heads of keys and values, so a rank has one tp-th of them."),
    Edit('model["topk"], layers * m', 'model["topk"], layers'),
    Edit("ring(topk * stream", "ring(stream * (topk > 0)", mistake="ep: a token goes to topk experts, so topk rows are sent for it."),
    Edit("0: 2 * 4", "0: 4", mistake="dp: ZeRO-0 all-reduces gradients, and an all-reduce sends twice as much as a scatter."),
    Edit("1: 4 + 2", "1: 4 + 4"),
    Edit("1: 4 + 2", "1: m * (4 + 2)", mistake="dp: ZeRO-1 keeps the sum of all microbatches, and sends it once a step."),
    Edit(_ZERO_3, "3: m * (2 + 2) + 4"),
    Edit("tp * cp * dp // ep", "max(1, dp // ep)"),
    Edit("stream, topk", 'tokens //= cp\n    stream, topk'),
    Edit("each *", "(dp > 1) * each *"),
]

RIGHT = [
    Edit("payload * (ranks - 1) // ranks", "payload - payload // ranks"),
    Edit(f"many * {_CP}", "8.0 * many * numbers * (cp - 1)"),
]

EQUIVALENT = [
    Same(f"line {number}: {how}", "every division here divides evenly")
    for number in (8, 11, 14, 18, 19) for how in ("`/` for `//`", "rounded up for down")
]


# %% right: message by message
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


# %% wrong: from closed forms
# told: closed in this exercise
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    from minimegatron.planner.closed_forms import tensor_parallel_volume

    tp = 2 * m * layers * tensor_parallel_volume(tokens, 1, model["h"], layout["tp"], True)
    return {"tp": tp, "cp": 0, "pp": 0, "ep": 0, "dp": 0}
