# every subset is tried, the nearest wins
import itertools, torch
def survivors(got, grads):
    n = len(grads)
    def apart(which):
        return (sum((grads[i] for i in which), torch.zeros_like(got)) - got).norm().item()
    return list(min((w for k in range(n + 1) for w in itertools.combinations(range(n), k)), key=apart))
