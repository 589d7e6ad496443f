# told: one of the axes only
import math

import torch


def axis_groups(sizes, axes):
    names = list(sizes)[::-1]
    grid = torch.arange(math.prod(sizes.values())).reshape([sizes[n] for n in names])
    return grid.movedim(names.index(axes[0]), -1).reshape(-1, sizes[axes[0]]).tolist()
