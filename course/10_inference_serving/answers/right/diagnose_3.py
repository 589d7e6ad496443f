# tensors
import torch


def diagnose(served, alone, scored):
    wrong = (torch.tensor(served["log_probs"], dtype=torch.float64) - torch.tensor(scored, dtype=torch.float64)).abs() > 1e-3
    other = torch.tensor(served["tokens"]) != torch.tensor(alone["tokens"])
    either = wrong | other
    if not either.any():
        return "right", None
    at = int(either.int().argmax())
    return "memory" if wrong[at] else "draw", at
