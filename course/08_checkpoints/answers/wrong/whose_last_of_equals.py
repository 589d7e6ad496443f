# told: here it is the last
# the last of several that are equal
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    out = {}
    for name, value in restored.items():
        out[name] = None
        for n, s in saved.items():
            if torch.equal(s, value):
                out[name] = n
        if name in saved and torch.equal(saved[name], value):
            out[name] = name
    return out
