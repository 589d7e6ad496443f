# told: averages of the same one
# a name that was found is not looked for again
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    free = dict(saved)
    out = {}
    for name, value in restored.items():
        out[name] = next((n for n in [name, *free] if n in free and torch.equal(free[n], value)), None)
        free.pop(out[name], None)
    return out
