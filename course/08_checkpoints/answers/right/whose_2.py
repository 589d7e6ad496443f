import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    def key(t):
        return tuple(t.shape), tuple(t.flatten().tolist())
    first = {}
    for name, t in saved.items():
        first.setdefault(key(t), name)
    return {name: name if name in saved and key(saved[name]) == key(t) else first.get(key(t)) for name, t in restored.items()}
