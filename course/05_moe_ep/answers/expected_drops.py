from labkit.answers import Edit, Same

_ROOM = "math.ceil(mean * factor)"

WRONG = [
    Edit("over / mean", "max(0.0, 1 - factor)",
         mistake="That is what an exactly even load would drop. Chance is never even: "
         "n is binomial, and an expert drops n - C where n is larger."),
    Edit(_ROOM, "math.floor(mean * factor)", mistake="The capacity is rounded up."),
    Edit(_ROOM, "math.ceil(tokens / experts * factor)",
         mistake="The capacity counts rows: there are k of them for each token."),
    Edit("(n - capacity) * math.exp", "math.exp", ("over / mean", "over"),
         mistake="That is the chance that an expert drops anything. Asked is how many rows: n - C where n is larger."),
    Edit("p, mean = k / experts", "p, mean = 1 / experts",
         mistake="A token chooses k of E experts: the chance that this expert is one of them is k/E."),
    Edit("    over = 0.0", "    p, tokens = 1 / experts, k * tokens\n    over = 0.0",
         mistake="Those are k T free choices. A token's k experts are different, so it chooses an expert once at "
         "most: T trials, "
         "each with probability k/E."),
    Edit("over / mean", "over * experts",
         mistake="That is how many rows are dropped. Asked is their share of the k T rows."),
    Edit("over / mean", "over / (k * tokens)", mistake="That is one expert's share. All E of them drop."),
    Edit("over / mean", "over * experts / tokens", mistake="The share is of the k*T rows, not of the T tokens."),
    Edit("(n - capacity) * math.exp", "(n - capacity) / n * math.exp", ("over / mean", "over"),
         mistake="That is a mean of quotients. A busy expert has more rows than others: take the mean number of "
         "dropped rows, "
         "and divide by all rows afterwards."),
    Edit("math.ceil(mean * factor)", "min(tokens, math.ceil(mean * factor))", told="capacity is wrong"),
    Edit(_ROOM, "int(mean * factor) + 1"),
    Edit(_ROOM, "round(mean * factor + 0.25)"),
    Edit(_ROOM, "max(math.ceil(mean * factor), math.ceil(mean))"),
    Edit("range(capacity + 1, tokens + 1)", "range(capacity + 1, min(tokens, 3 * capacity) + 1)"),
    # Poisson in place of the binomial
    Edit("math.exp(ways + n * math.log(p) + (tokens - n) * math.log(1 - p))",
         "math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))"),
    # two thousand throws, where the exact mean is asked for
    Edit("over / mean}",
         "(torch.binomial(torch.full((2000,), 1.0 * tokens), torch.tensor(p)) - capacity).clamp(0).mean() / mean}",
         ("import math", "import math\nimport torch")),
]

RIGHT = [Edit("math.log(1 - p)", "math.log1p(-p)", ("over / mean", "experts * over / (k * tokens)"))]

EQUIVALENT = [Same("line 9: 0 for 1", "an expert whose tokens just fit drops none of them")]


# %% right: what is kept, by exact fractions
import math
from fractions import Fraction

def expected_drops(tokens, experts, k, factor):
    C = -int(-tokens * k * factor // experts)
    ways = [math.comb(tokens, n) * k**n * (experts - k) ** (tokens - n) for n in range(tokens + 1)]
    kept = sum(min(n, C) * way for n, way in enumerate(ways))
    return {'capacity': C, 'dropped': float(1 - Fraction(kept * experts, tokens * k * experts**tokens))}


# %% right: each chance from the one before
import math

def expected_drops(tokens, experts, k, factor):
    p, C, over = k / experts, math.ceil(tokens * k / experts * factor), 0.0
    chance = (1 - p) ** tokens
    for n in range(tokens + 1):
        over += max(0, n - C) * chance
        chance *= (tokens - n) / (n + 1) * p / (1 - p)
    return {'capacity': C, 'dropped': experts * over / (k * tokens)}


# %% wrong: math.comb times floats
# told: No float holds
import math

def expected_drops(tokens, experts, k, factor):
    p, C = k / experts, math.ceil(tokens * k / experts * factor)
    over = sum((n - C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(C + 1, tokens + 1))
    return {'capacity': C, 'dropped': experts * over / (k * tokens)}


# %% right: torch.distributions
import math
import torch

def expected_drops(tokens, experts, k, factor):
    capacity = math.ceil(tokens * k / experts * factor)
    n = torch.arange(tokens + 1, dtype=torch.float64)
    chance = torch.distributions.Binomial(tokens, torch.tensor(k / experts, dtype=torch.float64)).log_prob(n).exp()
    dropped = torch.relu(n - capacity) @ chance * experts / (k * tokens)
    return {"capacity": capacity, "dropped": dropped}
