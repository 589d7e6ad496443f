# told: not orthogonal
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if (g * got).sum() > 0]
