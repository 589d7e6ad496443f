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
