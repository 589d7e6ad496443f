# told: changes
import math, torch
def axis_groups(sizes, axes):
    names, shape, members = list(reversed(sizes)), [], 1
    free = [i for i, n in enumerate(names) if n in axes]
    fixed = [i for i, n in enumerate(names) if n not in axes]
    while sizes:
        name, size = sizes.popitem()
        shape.append(size)
        members *= size if name in axes else 1
    return torch.arange(math.prod(shape)).view(shape).permute(*fixed, *free).reshape(-1, members).tolist()
