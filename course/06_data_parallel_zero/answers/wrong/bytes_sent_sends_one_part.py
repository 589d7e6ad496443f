# told: is what a rank keeps
def bytes_sent(stage, weights, gradients, ranks, microbatches=1, kept=False):
    if stage == 0: return 2 * gradients/ranks
    if stage == 1: return (gradients + weights)/ranks
    if stage == 2: return (gradients * microbatches + weights)/ranks
    return (gradients + (1 if kept else 2) * weights) * microbatches/ranks
