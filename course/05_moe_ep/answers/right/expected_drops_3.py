# torch.distributions
import math
import torch


def expected_drops(tokens, experts, k, factor):
    capacity = math.ceil(tokens * k / experts * factor)
    n = torch.arange(tokens + 1, dtype=torch.float64)
    chance = torch.distributions.Binomial(tokens, torch.tensor(k / experts, dtype=torch.float64)).log_prob(n).exp()
    dropped = torch.relu(n - capacity) @ chance * experts / (k * tokens)
    return {"capacity": capacity, "dropped": dropped}
