import torch


def load_box(memory, regions: list, box: list[list[int]]) -> torch.Tensor:
    (r0, r1), (c0, c1) = box
    numbers = {}
    for file, at, (rs, cs) in regions:
        width = cs[1] - cs[0]
        for row in range(*rs):
            shared = [c for c in range(*cs) if c0 <= c < c1] if r0 <= row < r1 else []
            if shared:
                first = at + (row - rs[0]) * width + shared[0] - cs[0]
                for column, value in zip(shared, memory.load(file, first, first + len(shared)).tolist()):
                    numbers[row, column] = value
    holes = [(r, c) for r in range(r0, r1) for c in range(c0, c1) if (r, c) not in numbers]
    if holes:
        raise ValueError(f"no region has {holes[0]}")
    return torch.tensor([[numbers[r, c] for c in range(c0, c1)] for r in range(r0, r1)])
