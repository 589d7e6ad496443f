# told: with the sum by itself
def survivors(got, grads):
    return [i for i, g in enumerate(grads) if float((g * got).sum() / (g * g).sum()) > 0.5]
