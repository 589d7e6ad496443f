# told: matters in stage 3 only
def bytes_sent(stage, weights, gradients, ranks, microbatches=1, kept=False):
    f = (ranks - 1) / ranks
    if stage == 0: return 2 * gradients * f
    g = microbatches if stage > 1 else 1
    w = {1: 1, 2: 1, 3: 2 * microbatches}[stage] - (1 if kept and stage == 2 else microbatches if kept and stage == 3 else 0)
    return (gradients * g + w * weights) * f
