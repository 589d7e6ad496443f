from labkit.answers import Edit, Same

_SENDS = 'm * (2 * layout["v"] - (rank == 0) - (rank == pp - 1))'
_EACH = '{0: 2 * 4, 1: 4 + 2, 3: m * (2 + 2 + 4)}[layout["zero"]]'
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit("payload * (ranks - 1) // ranks", "payload * (ranks > 1)"),
    Edit("payload * (ranks - 1) // ranks", "payload * (ranks - 1)", mistake="In a ring of n ranks a rank sends (n - 1)/n of a payload."),
    Edit("(5 if topk else 10)", "(4 if topk else 8)", mistake="tp: the backward pass of the first matrix of a pair gathers its input once more."),
    Edit("(5 if topk else 10)", "10", mistake="tp: a layer with experts has one pair of matrices that tp cuts, attention's."),
    Edit("(5 if topk else 10)", "(2 if topk else 4)", mistake="tp: that is the forward pass alone."),
    Edit("(2 + 2 + 4) * numbers", "4 * numbers", mistake="cp: half of it is missing: keys and values both travel, forward and again backward, and their " "gradients with them, in fp32."),
    Edit("(2 + 2 + 4) * numbers", "2 * numbers", mistake="cp: the backward pass is missing: keys and values come by once more, and their gradients with " "them, in fp32."),
    Edit("(2 + 2 + 4) * numbers", "(2 + 2 + 2) * numbers", mistake="cp: the backward pass is missing: keys and values come by once more, and their gradients with " "them, in fp32."),
    Edit("sends * stream // tp", "sends * stream", mistake="pp: the message between stages is cut over tp, as with sequence parallelism all of the stream " "is."),
    Edit(_SENDS, 'm * 2 * layout["v"] if pp > 1 else 0', mistake="pp: the last stage has no next one, and the first has none before it."),
    Edit('2 * layout["v"] -', "2 -", mistake="pp: with v chunks a microbatch comes to each rank v times."),
    Edit(
        '(2 * layout["v"] - (rank == 0) - (rank == pp - 1))',
        'layout["v"] * (2 - (rank == 0) - (rank == pp - 1))',
        mistake="pp: with v chunks the last rank sends its outputs to the first one, but for its last chunk.",
    ),
    Edit(_SENDS, 'm * layout["v"] if pp > 1 else 0', mistake="pp: outputs go forward, gradients go back."),
    Edit("many * 4 * ring", "many * 2 * ring", mistake="ep: rows go there and back, and so do their gradients."),
    Edit("ring(topk * stream // tp, ep)", "ring(topk * stream, ep)", mistake="ep: with sequence parallelism each rank of tp sends its own tokens, not those of all."),
    Edit("ring(dense, dp * cp)", "ring(dense, dp)", mistake="dp: ranks of cp have the same dense parameters, so their gradients are summed over dp * cp " "ranks."),
    Edit("ring(experts, expert_dp)", "ring(experts, dp * cp)", mistake="dp: other ranks hold the same experts."),
    Edit("0: 2 * 4", "0: 4", mistake="dp: an all-reduce is a reduce-scatter and an all-gather; what ZeRO-3 sends it sends for every " "microbatch."),
    Edit("3: m * (2 + 2 + 4)", "3: 2 + 2 + 4", mistake="dp: an all-reduce is a reduce-scatter and an all-gather; what ZeRO-3 sends it sends for every " "microbatch."),
    Edit("1: 4 + 2", "1: 4 + 4", mistake="dp: after the step ZeRO-1 gathers weights, which have 2 bytes."),
    Edit("1: 4 + 2", "1: 4", mistake="dp: after the step ZeRO-1 gathers the updated weights."),
    Edit("3: m * (2 + 2 + 4)", "3: m * (2 + 4)", mistake="dp: ZeRO-3 gathers weights for the forward pass and again for the backward pass."),
    Edit(" + ring(experts, expert_dp)", "", mistake="dp: the gradients of experts are summed, too."),
    Edit('model["topk"], layers * m', 'model["topk"], layers'),
    Edit("* tokens // tp\n", "* tokens\n"),
    Edit("* ring(stream, tp)", "* stream * (tp > 1)", mistake="In a ring of n ranks a rank sends (n - 1)/n of a payload."),
    Edit("many * (cp - 1) * (2 + 2 + 4) * numbers", "many * (2 + 2 + 4) * ring(numbers, cp)", mistake="cp: neighbours send a whole block in each of cp - 1 rounds; (n - 1)/n is the share of a ring " "that gathers."),
    Edit('2 * model["groups"]', 'model["groups"]', mistake="cp: half of it is missing: keys and values both travel, forward and again backward, and their " "gradients with them, in fp32."),
    Edit("ring(topk * stream", "ring(stream * (topk > 0)", mistake="ep: every token goes to topk experts, a row for each."),
    Edit("1: 4 + 2", "1: m * (4 + 2)", mistake="dp: ZeRO-1 scatters gradients and gathers weights once a step, however many microbatches it has."),
    Edit("many * 4 * ring", "many * 8 * ring", mistake="ep: a row goes there and back, forward and backward: four times, whatever room experts have."),
    Edit("tp * cp * dp // ep", "max(1, dp // ep)", mistake="dp: etp is 1, so the ranks that hold the same expert are among all tp * cp * dp ranks of a " "stage."),
    Edit("(cp - 1) * (2 + 2 + 4)", "(2 + 2 + 4)"),
]

RIGHT = [
    Edit("payload * (ranks - 1) // ranks", "payload - payload // ranks"),
    Edit("many * (cp - 1) * (2 + 2 + 4) * numbers", "8 * many * numbers * (cp - 1)"),
    Edit(_EACH, '[8, 6, 0, 8 * m][layout["zero"]]'),
]

EQUIVALENT = [
    Same("line 8: `/` for `//`", _WHOLE),
    Same("line 8: rounded up for down", _WHOLE),
    Same("line 11: `/` for `//`", _WHOLE),
    Same("line 11: rounded up for down", _WHOLE),
    Same("line 14: `/` for `//`", _WHOLE),
    Same("line 14: rounded up for down", _WHOLE),
    Same("line 18: `/` for `//`", _WHOLE),
    Same("line 18: rounded up for down", _WHOLE),
    Same("line 19: `/` for `//`", _WHOLE),
    Same("line 19: rounded up for down", _WHOLE),
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


# %% right: floats, and both kinds of parameters at once
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    tp, cp, pp, dp, ep, v = (layout[x] for x in ("tp","cp","pp","dp","ep","v"))
    share = lambda n: (n-1)/n
    kv = 2*model["groups"]*model["d"]*tokens/tp
    fwd = v - (rank==pp-1); bwd = v - (rank==0)
    rounds = {0: [4,4], 1:[4,2], 3: m*[2,2,4]}[layout["zero"]]
    moe = model["topk"] > 0
    return {
      "tp": share(tp)*2*tokens*model["h"]*layers*m*(5 if moe else 10),
      "cp": kv*(cp-1)*(2+2+4)*layers*m,
      "pp": (fwd+bwd)*m*2*tokens*model["h"]/tp*(pp>1),
      "ep": share(ep)*2*model["topk"]*tokens/tp*model["h"]*layers*m*4,
      "dp": sum(rounds)*(dense*share(dp*cp)+experts*share(tp*cp*dp/ep)),
    }


# %% wrong: dp zero when dp one
# mistake: dp: the ring has dp * cp ranks, or those with the same expert: with dp 1, too.
# dp 1 sends nothing
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    tp, cp, pp, dp, ep, v = (layout[x] for x in ("tp","cp","pp","dp","ep","v"))
    share = lambda n: (n-1)/n
    kv = 2*model["groups"]*model["d"]*tokens/tp
    fwd = v - (rank==pp-1); bwd = v - (rank==0)
    rounds = {0: [4,4], 1:[4,2], 3: m*[2,2,4]}[layout["zero"]]
    moe = model["topk"] > 0
    return {
      "tp": share(tp)*2*tokens*model["h"]*layers*m*(5 if moe else 10),
      "cp": kv*(cp-1)*(2+2+4)*layers*m,
      "pp": (fwd+bwd)*m*2*tokens*model["h"]/tp*(pp>1),
      "ep": share(ep)*2*model["topk"]*tokens/tp*model["h"]*layers*m*4,
      "dp": sum(rounds)*(dense*share(dp*cp)+experts*share(tp*cp*dp/ep)) if dp>1 else 0,
    }


# %% wrong: experts ring dp over ep
# mistake: dp: etp is 1, so ranks of tp hold whole experts: they are in the experts' ring, too.
# ep is taken out of dp
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    tp, cp, pp, dp, ep, v = (layout[x] for x in ("tp","cp","pp","dp","ep","v"))
    share = lambda n: (n-1)/n
    kv = 2*model["groups"]*model["d"]*tokens/tp
    fwd = v - (rank==pp-1); bwd = v - (rank==0)
    rounds = {0: [4,4], 1:[4,2], 3: m*[2,2,4]}[layout["zero"]]
    moe = model["topk"] > 0
    return {
      "tp": share(tp)*2*tokens*model["h"]*layers*m*(5 if moe else 10),
      "cp": kv*(cp-1)*(2+2+4)*layers*m,
      "pp": (fwd+bwd)*m*2*tokens*model["h"]/tp*(pp>1),
      "ep": share(ep)*2*model["topk"]*tokens/tp*model["h"]*layers*m*4,
      "dp": sum(rounds)*(dense*share(dp*cp)+experts*share(max(1,cp*dp/ep))),
    }


# %% wrong: tokens divided by cp again
# mistake: `tokens` are those of this rank of cp already: they are not divided once more.
# cp divides the tokens once more
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    tokens = tokens // layout["cp"]
    tp, cp, pp, dp, ep, v = (layout[x] for x in ("tp","cp","pp","dp","ep","v"))
    share = lambda n: (n-1)/n
    kv = 2*model["groups"]*model["d"]*tokens/tp
    fwd = v - (rank==pp-1); bwd = v - (rank==0)
    rounds = {0: [4,4], 1:[4,2], 3: m*[2,2,4]}[layout["zero"]]
    moe = model["topk"] > 0
    return {
      "tp": share(tp)*2*tokens*model["h"]*layers*m*(5 if moe else 10),
      "cp": kv*(cp-1)*(2+2+4)*layers*m,
      "pp": (fwd+bwd)*m*2*tokens*model["h"]/tp*(pp>1),
      "ep": share(ep)*2*model["topk"]*tokens/tp*model["h"]*layers*m*4,
      "dp": sum(rounds)*(dense*share(dp*cp)+experts*share(tp*cp*dp/ep)),
    }


# %% wrong: zero3 overlap weights once
# mistake: dp: ZeRO-3 scatters gradients in every microbatch.
# ZeRO-3 scatters gradients once a step
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    tp, cp, pp, dp, ep, v = (layout[x] for x in ("tp","cp","pp","dp","ep","v"))
    share = lambda n: (n-1)/n
    kv = 2*model["groups"]*model["d"]*tokens/tp
    fwd = v - (rank==pp-1); bwd = v - (rank==0)
    rounds = {0: [4,4], 1:[4,2], 3: [2*m,2*m,4]}[layout["zero"]]
    moe = model["topk"] > 0
    return {
      "tp": share(tp)*2*tokens*model["h"]*layers*m*(5 if moe else 10),
      "cp": kv*(cp-1)*(2+2+4)*layers*m,
      "pp": (fwd+bwd)*m*2*tokens*model["h"]/tp*(pp>1),
      "ep": share(ep)*2*model["topk"]*tokens/tp*model["h"]*layers*m*4,
      "dp": sum(rounds)*(dense*share(dp*cp)+experts*share(tp*cp*dp/ep)),
    }
# %% wrong: from closed forms
# told: closed in this exercise
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    from minimegatron.planner.closed_forms import tensor_parallel_volume

    tp = 2 * m * layers * tensor_parallel_volume(tokens, 1, model["h"], layout["tp"], True)
    return {"tp": tp, "cp": 0, "pp": 0, "ep": 0, "dp": 0}


