# told: only microbatches that follow each other
def survivors(got, grads):
    n = len(grads)
    def apart(which): return (sum(grads[i] for i in which) - got).norm().item()
    return list(min((range(a, b) for a in range(n) for b in range(a + 1, n + 1)), key=apart))
