# told: leaves out one after the other
def survivors(got, grads):
    kept = list(range(len(grads)))

    def apart(chosen):
        return float((sum(grads[i] for i in chosen) - got).norm())

    while len(kept) > 1:
        best = min(kept, key=lambda i: apart([j for j in kept if j != i]))
        if apart([j for j in kept if j != best]) >= apart(kept):
            break
        kept.remove(best)
    return kept
