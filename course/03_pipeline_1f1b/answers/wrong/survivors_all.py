# told: did not survive
def survivors(got, grads):
    return list(range(len(grads)))
