# told: decide on all together
import torch
def survivors(got, grads):
    rest, found = got.clone(), []
    left = list(range(len(grads)))
    while left and rest.norm() > 1e-3 * got.norm():
        best = min(left, key=lambda i: float((rest - grads[i]).norm()))
        if (rest - grads[best]).norm() >= rest.norm():
            break
        found.append(best)
        left.remove(best)
        rest = rest - grads[best]
    return sorted(found)
