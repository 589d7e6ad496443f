from labkit.answers import Edit, Same

_SENDS = 'm * (2 * layout["v"] - (rank == 0) - (rank == pp - 1))'
_EACH = '{0: 2 * 4, 1: 4 + 2, 3: m * (2 + 2 + 4)}[layout["zero"]]'
_WHOLE = "every division here divides evenly"

WRONG = [
    Edit("payload * (ranks - 1) // ranks", "payload * (ranks > 1)"),
    Edit("payload * (ranks - 1) // ranks", "payload * (ranks - 1)", told="(n - 1)/n"),
    Edit("(5 if topk else 10)", "(4 if topk else 8)", told="once more"),
    Edit("(5 if topk else 10)", "10", told="one pair"),
    Edit("(5 if topk else 10)", "(2 if topk else 4)", told="forward pass alone"),
    Edit("(2 + 2 + 4) * numbers", "4 * numbers", told="half of it"),
    Edit("(2 + 2 + 4) * numbers", "2 * numbers", told="backward pass is missing"),
    Edit("(2 + 2 + 4) * numbers", "(2 + 2 + 2) * numbers", told="in fp32"),
    Edit("sends * stream // tp", "sends * stream", told="cut over tp"),
    Edit(_SENDS, 'm * 2 * layout["v"] if pp > 1 else 0', told="no next one"),
    Edit('2 * layout["v"] -', "2 -", told="v times"),
    Edit(
        '(2 * layout["v"] - (rank == 0) - (rank == pp - 1))',
        'layout["v"] * (2 - (rank == 0) - (rank == pp - 1))',
        told="sends its outputs to the first",
    ),
    Edit(_SENDS, 'm * layout["v"] if pp > 1 else 0', told="gradients go back"),
    Edit("many * 4 * ring", "many * 2 * ring", told="so do their gradients"),
    Edit("ring(topk * stream // tp, ep)", "ring(topk * stream, ep)", told="its own tokens"),
    Edit("ring(dense, dp * cp)", "ring(dense, dp)", told="ranks of cp"),
    Edit("ring(experts, expert_dp)", "ring(experts, dp * cp)", told="other ranks"),
    Edit("0: 2 * 4", "0: 4", told="all-reduce"),
    Edit("3: m * (2 + 2 + 4)", "3: 2 + 2 + 4", told="every microbatch"),
    Edit("1: 4 + 2", "1: 4 + 4", told="2 bytes"),
    Edit("1: 4 + 2", "1: 4", told="updated weights"),
    Edit("3: m * (2 + 2 + 4)", "3: m * (2 + 4)", told="again for the backward"),
    Edit(" + ring(experts, expert_dp)", "", told="experts are summed"),
    Edit('model["topk"], layers * m', 'model["topk"], layers'),
    Edit("* tokens // tp\n", "* tokens\n"),
    Edit("* ring(stream, tp)", "* stream * (tp > 1)", told="(n - 1)/n"),
    Edit("many * (cp - 1) * (2 + 2 + 4) * numbers", "many * (2 + 2 + 4) * ring(numbers, cp)", told="whole block"),
    Edit('2 * model["groups"]', 'model["groups"]', told="half of it"),
    Edit("ring(topk * stream", "ring(stream * (topk > 0)", told="topk experts"),
    Edit("1: 4 + 2", "1: m * (4 + 2)", told="once a step"),
    Edit("many * 4 * ring", "many * 8 * ring", told="four times"),
    Edit("tp * cp * dp // ep", "max(1, dp // ep)", told="among all"),
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
# told: with dp 1, too
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
# told: experts' ring
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


# %% wrong: from closed forms
# told: closed in this exercise
def bytes_sent(model, layout, tokens, layers, m, rank, dense, experts):
    from minimegatron.planner.closed_forms import tensor_parallel_volume

    tp = 2 * m * layers * tensor_parallel_volume(tokens, 1, model["h"], layout["tp"], True)
    return {"tp": tp, "cp": 0, "pp": 0, "ep": 0, "dp": 0}


# %% wrong: tokens divided by cp again
# told: already
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
# told: scatters gradients in every
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
