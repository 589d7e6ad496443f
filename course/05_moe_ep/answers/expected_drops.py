from labkit.answers import Edit, Same

WRONG = [
    Edit("over / mean", "over / (k * tokens)", mistake="That is one expert's share. All E of them drop."),
    Edit("over / mean", "over * experts / tokens", mistake="The share is of the k*T rows, not of the T tokens."),
    Edit("p, mean = k / experts", "p, mean = 1 / experts", mistake="A token chooses k of E experts: the chance that this expert is one of them is k/E."),
    Edit("math.ceil", "math.floor", mistake="The rows are counted over a capacity that is not rounded up."),
    Edit("math.ceil(mean * factor)", "min(tokens, math.ceil(mean * factor))", told="capacity is wrong"),
    Edit("math.ceil(mean * factor)", "int(mean * factor) + 1"),
    Edit("math.ceil(mean * factor)", "round(mean * factor)"),
    Edit("math.ceil(mean * factor)", "round(mean * factor + 0.25)"),
    Edit("math.ceil(mean * factor)", "max(math.ceil(mean * factor), math.ceil(mean))"),
    Edit("(n - capacity) * math.exp", "math.exp"),
    Edit("range(capacity + 1, tokens + 1)", "range(capacity + 1, min(tokens, 3 * capacity) + 1)"),
    Edit("k / experts, tokens * k / experts", "k / experts, tokens * k // experts"),
    # Poisson in place of the binomial
    Edit(
        "ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)",
        "",
        (
            "math.exp(ways + n * math.log(p) + (tokens - n) * math.log(1 - p))",
            "math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))",
        ),
    ),
]

RIGHT = [
    Edit("math.log(1 - p)", "math.log1p(-p)", ("over / mean", "experts * over / (k * tokens)")),
]

EQUIVALENT = [
    Same("line 9: 0 for 1", "an expert whose tokens just fit drops none of them"),
]


# %% right: what is kept, by math.comb
import math
def expected_drops(tokens, experts, k, factor):
    p, C = k / experts, -int(-tokens * k * factor // experts)
    kept = sum(min(n, C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1))
    return {'capacity': C, 'dropped': 1 - kept / (tokens * p)}


# %% right: the distribution by repeated convolution
import math
import torch
def expected_drops(tokens, experts, k, factor):
    p, d = k / experts, torch.zeros(tokens + 1, dtype=torch.float64)
    d[0] = 1
    for _ in range(tokens):
        d = d * (1 - p) + torch.cat((torch.zeros(1), d[:-1])) * p
    C = math.ceil(tokens * k * factor / experts)
    n = torch.arange(tokens + 1)
    return {'capacity': C, 'dropped': ((n - C).clamp(min=0) * d).sum() * experts / (k * tokens)}


# %% right: torch.distributions
import math
import torch


def expected_drops(tokens, experts, k, factor):
    capacity = math.ceil(tokens * k / experts * factor)
    n = torch.arange(tokens + 1, dtype=torch.float64)
    chance = torch.distributions.Binomial(tokens, torch.tensor(k / experts, dtype=torch.float64)).log_prob(n).exp()
    dropped = torch.relu(n - capacity) @ chance * experts / (k * tokens)
    return {"capacity": capacity, "dropped": dropped}


# %% right: a sum of tails
import math

def expected_drops(tokens, experts, k, factor):
    """E max(n - C, 0) is the sum over c >= C of P(n > c)."""
    C = -int(-(tokens * k * factor) // experts)
    p = k / experts
    pmf = [math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1)]
    lost = sum(sum(pmf[c + 1 :]) for c in range(C, tokens))
    return {"capacity": C, "dropped": lost / (tokens * p)}


# %% wrong: chance of any
# mistake: That is the chance that an expert drops anything. Asked is how many rows: n - C where n is larger.
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens * k / experts * factor)
    p = k / experts
    return {"capacity": C, "dropped": sum(math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(C + 1, tokens + 1))}


# %% wrong: chance taken for even
# mistake: That is what an exactly even load would drop. Chance is never even: n is binomial, and an expert drops n - C where n is larger.
import math
def expected_drops(tokens, experts, k, factor):
    return {'capacity': math.ceil(tokens * k / experts * factor), 'dropped': max(0.0, 1 - factor)}


# %% wrong: free choices
# mistake: Those are k T free choices. A token's k experts are different, so it chooses an expert once at most: T trials, each with probability k/E.
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens * k / experts * factor)
    p, N = 1 / experts, k * tokens
    over = sum((n - C) * math.comb(N, n) * p**n * (1 - p) ** (N - n) for n in range(C + 1, N + 1))
    return {"capacity": C, "dropped": experts * over / N}


# %% wrong: mean of quotients
# mistake: That is a mean of quotients. A busy expert has more rows than others: take the mean number of dropped rows, and divide by all rows afterwards.
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens * k / experts * factor)
    p = k / experts
    return {"capacity": C, "dropped": sum((n - C) / n * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(C + 1, tokens + 1))}


# %% wrong: room without k
# mistake: The capacity counts rows: there are k of them for each token.
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens / experts * factor)
    p = k / experts
    over = sum((n - C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(C + 1, tokens + 1))
    return {"capacity": C, "dropped": experts * over / (k * tokens)}


# %% wrong: by simulation
# two thousand throws, where the exact mean is asked for
import math

import torch


def expected_drops(tokens, experts, k, factor):
    mean = tokens * k / experts
    capacity = math.ceil(mean * factor)
    g = torch.Generator().manual_seed(0)
    n = (torch.rand(2000, tokens, generator=g) < k / experts).sum(1)
    return {"capacity": capacity, "dropped": (n - capacity).clamp(min=0).float().mean().item() / mean}


